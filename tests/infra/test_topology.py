"""Slices that exist, against published figures, and slices that do not."""

import pytest

from infra.topology import TopologyError, parse


@pytest.mark.parametrize(
    ("name", "chips", "hosts", "devices", "gib"),
    [
        ("v4:2x2x2", 8, 2, 8, 32),
        ("v5p:4x4x4", 64, 16, 64, 95),
        ("v5p:8x8x8", 512, 128, 512, 95),
        ("v5e:4x4", 16, 4, 16, 16),
        ("v6e:16x16", 256, 64, 256, 32),
        ("v6e:1x1", 1, 1, 1, 32),
        ("tpu7x:4x4x4", 64, 16, 128, 96),
    ],
)
def test_slices_that_exist(name, chips, hosts, devices, gib):
    found = parse(name)
    assert (found.chips, found.hosts, found.devices) == (chips, hosts, devices)
    assert found.memory_per_device == gib * 2**30
    assert found.name == name


@pytest.mark.parametrize(
    "name",
    [
        "v4:1x1x1",
        "v5p:3x7x13",
        "v5p:4x4",
        "v5p:8x4x4",
        "v6e:4x4x4",
        "v6e:3x3",
        "v5p",
        "v5p:",
        "v5p:axb",
        "v5p:32x32x32",
    ],
)
def test_slices_that_do_not(name):
    with pytest.raises(TopologyError, match="does not exist"):
        parse(name)


def test_unknown_type_lists_the_known():
    with pytest.raises(TopologyError, match=r"unknown TPU type 'v7x'(.|\n)*tpu7x"):
        parse("v7x:4x4x4")


def test_the_compiler_is_told_to_join_the_cores_of_a_v4_chip():
    """Real v4 slices have one device per chip; libtpu gives two unless told."""
    assert parse("v4:2x2x1").compiler_options == {"chip_config_name": "megacore"}
    assert parse("v5p:1x1x1").compiler_options == parse("tpu7x:2x2x1").compiler_options == {}
