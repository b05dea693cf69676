"""TPU slices that exist: chips, hosts, devices, memory, peak FLOP/s, bandwidth, GKE names.

    slice_ = parse("v5p:4x4x4")      # Slice(type=v5p, shape=(4, 4, 4)): 64 chips, 16 hosts, 64 devices

XManager accepts any shape that looks like one (`3x7x13`), so we validate here, before anything is launched.
The surprising thing: a tpu7x chip is two JAX devices, every other chip is one. The two cores of a v4 chip run as one
device on real slices (megacore); libtpu's compiler splits them unless it is told `chip_config_name="megacore"`.

Every figure has its page beside it. `link_bandwidth` is one direction over all links of a chip: half of the
"bidirectional ICI bandwidth" of the newer pages, equal to the "interchip interconnect BW" of the older ones.
GKE names: https://docs.cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus
"""

import math
from dataclasses import dataclass

from infra.errors import ReproError


class TopologyError(ReproError):
    """The named slice does not exist."""


@dataclass(frozen=True)
class ChipType:
    """One generation. Bytes and FLOP/s are per chip; `flat` generations have a fixed list of 2-D shapes."""

    name: str
    memory_bytes: float
    bf16_flops: float
    memory_bandwidth: float
    link_bandwidth: float
    devices_per_chip: int
    chips_per_host: int
    flat: bool
    max_chips: int
    gke_accelerator: str
    gke_machine: str
    chip_config: str = ""  # libtpu's chip_config_name; empty: its default gives `devices_per_chip` devices
    one_chip: bool = False  # a slice 1x1x1 is offered (3-D generations)


GIB = 2.0**30
TYPES = {
    t.name: t
    for t in (
        # https://docs.cloud.google.com/tpu/docs/v4: 275 TFLOPS bf16, 32 GiB, 1,200 GB/s (1,228 in "TPU v4", ISCA 2023,
        # https://arxiv.org/abs/2304.01433, table 4, as are six links of 50 GB/s), 4,096 chips.
        ChipType("v4", 32 * GIB, 275e12, 1.2e12, 300e9, 1, 4, False, 4096, "tpu-v4-podslice", "ct4p-hightpu-4t",
                 chip_config="megacore"),
        # https://docs.cloud.google.com/tpu/docs/v5e: 197 TFLOPs bf16, 16 GB, 819 GB/s, ICI 400 GB/s in both directions
        # (1,600 Gbps), 256 chips, 2-D torus.
        ChipType("v5e", 16 * GIB, 197e12, 0.819e12, 200e9, 1, 4, True, 256, "tpu-v5-lite-podslice", "ct5lp-hightpu-4t"),
        # https://docs.cloud.google.com/tpu/docs/v5p: 459 TFLOPs bf16, 95 GiB, 2,765 GB/s, ICI 1,200 GB/s in both
        # directions (4,800 Gbps), 8,960 chips of which one job takes at most 6,144.
        ChipType("v5p", 95 * GIB, 459e12, 2.765e12, 600e9, 1, 4, False, 6144, "tpu-v5p-slice", "ct5p-hightpu-4t",
                 one_chip=True),
        # https://docs.cloud.google.com/tpu/docs/v6e: 918 TFLOPs bf16, 32 GB, 1,638 GB/s, ICI 800 GB/s in both directions.
        ChipType("v6e", 32 * GIB, 918e12, 1.638e12, 400e9, 1, 4, True, 256, "tpu-v6e-slice", "ct6e-standard-4t"),
        # https://docs.cloud.google.com/tpu/docs/tpu7x: 2,307 TFLOPs bf16, 192 GiB, 7,380 GB/s, ICI 1,200 GB/s in both
        # directions, 9,216 chips, two devices per chip.
        ChipType("tpu7x", 192 * GIB, 2307e12, 7.38e12, 600e9, 2, 4, False, 9216, "tpu7x", "tpu7x-standard-4t",
                 one_chip=True),
    )
}  # fmt: skip
FLAT_SHAPES = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
# 1x1x1 comes with the machines ct5p-hightpu-1t and tpu7x-standard-1t; v4 has ct4p-hightpu-4t alone (its smallest slice is
# v4-8, four chips).
SMALL_CUBES = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))

# Names JAX gives to the devices of each generation (`jax.devices()[0].device_kind`).
TPU_KINDS = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU7x": "tpu7x",
}
# Peak dense bf16 FLOP/s of GPUs by a part of their name. Source: NVIDIA data sheets "A100 Tensor Core GPU" (312 dense),
# "H100 Tensor Core GPU" SXM and "H200" (1,979 with sparsity, half of it dense), "HGX B200" (36 PFLOPS with sparsity for
# eight, 2,250 dense for one).
GPU_BF16_FLOPS = {"A100": 312e12, "H100": 989.4e12, "H200": 989.4e12, "B200": 2250e12}


def peak_flops(device_kind: str) -> float | None:
    """Peak dense bf16 FLOP/s of one JAX device by its kind; None when it is not in the table (every CPU)."""
    if device_kind in TPU_KINDS:
        chip = TYPES[TPU_KINDS[device_kind]]
        return chip.bf16_flops / chip.devices_per_chip
    return next((flops for part, flops in GPU_BF16_FLOPS.items() if part in device_kind), None)


@dataclass(frozen=True)
class Slice:
    """A slice of one generation with its shape in chips."""

    type: ChipType
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.type.name}:{self.topology}"

    @property
    def topology(self) -> str:
        """The shape as GKE and XLA write it: `4x4x4`."""
        return "x".join(map(str, self.shape))

    @property
    def chips(self) -> int:
        return math.prod(self.shape)

    @property
    def devices(self) -> int:
        """JAX devices of the slice."""
        return self.chips * self.type.devices_per_chip

    @property
    def hosts(self) -> int:
        return max(1, self.chips // self.type.chips_per_host)

    @property
    def chips_per_host(self) -> int:
        return min(self.chips, self.type.chips_per_host)

    @property
    def compiler_options(self) -> dict[str, str]:
        """What libtpu must be told beside the name, so that its topology has the devices of the real slice."""
        return {"chip_config_name": self.type.chip_config} if self.type.chip_config else {}

    @property
    def memory_per_device(self) -> float:
        """Bytes of HBM of one JAX device."""
        return self.type.memory_bytes / self.type.devices_per_chip

    @property
    def flops_per_device(self) -> float:
        """Peak dense bf16 FLOP/s of one JAX device."""
        return self.type.bf16_flops / self.type.devices_per_chip


def parse(text: str) -> Slice:
    """The slice called `type:shape`, for instance `v5p:4x4x4`.

    Raises TopologyError that names the known types, or the nearest shapes that exist.
    """
    kind, _, shape_text = text.partition(":")
    if kind not in TYPES:
        raise TopologyError(
            f"unknown TPU type {kind!r} in topology {text!r}", f"known types: {', '.join(TYPES)}"
        )
    chip = TYPES[kind]
    try:
        shape = tuple(int(n) for n in shape_text.split("x"))
    except ValueError:
        shape = ()
    found = Slice(chip, shape)
    if not _exists(chip, shape):
        raise TopologyError(f"the topology {text!r} does not exist", f"{kind} slices: {_choices(chip)}")
    return found


def _exists(chip: ChipType, shape: tuple[int, ...]) -> bool:
    if chip.flat:
        return shape in FLAT_SHAPES
    if len(shape) != 3:
        return False
    if shape in _small(chip):
        return True
    return (
        min(shape) >= 4
        and all(n % 4 == 0 for n in shape)
        and list(shape) == sorted(shape)
        and math.prod(shape) <= chip.max_chips
    )


def _small(chip: ChipType) -> tuple[tuple[int, ...], ...]:
    return ((1, 1, 1), *SMALL_CUBES) if chip.one_chip else SMALL_CUBES


def _choices(chip: ChipType) -> str:
    if chip.flat:
        return ", ".join("x".join(map(str, s)) for s in FLAT_SHAPES)
    small = ", ".join("x".join(map(str, s)) for s in _small(chip))
    return f"{small}, or AxBxC with A <= B <= C, all multiples of 4, at most {chip.max_chips} chips"
