"""The price table: entries that are no price are named; null is an unknown price."""

import pytest

from infra.errors import ReproError
from infra.prices import price_of


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"v5p": NaN}', "v5p is 'nan'"),
        ('{"v5p": 1e999}', "v5p is 'inf'"),
        ('{"v5p": -1}', "v5p is '-1'"),
        ('{"v5p": "4.2"}', "v5p is '4.2'"),
        ('{"v5p": true}', "v5p is 'True'"),
        ('{"v5p": 1' + "0" * 400 + "}", "which is no price"),
        ('{"v9": 1.0}', "unknown chip 'v9'"),
        ("[1]", "no JSON object"),
        ("[" * 100_000, "cannot be read"),
        ("price", "cannot be read"),
    ],
)
def test_what_is_no_price_is_named(text, said, tmp_path):
    (tmp_path / "prices.json").write_text(text)
    with pytest.raises(ReproError, match=said):
        price_of("v5p", str(tmp_path / "prices.json"))


def test_null_is_unknown_and_zero_is_a_price(tmp_path):
    table = tmp_path / "prices.json"
    table.write_text('{"v5p": null, "v4": 0}')
    assert price_of("v5p", str(table)) is None and price_of("v4", str(table)) == 0.0
    assert price_of("v6e", str(table)) == price_of("v6e")
