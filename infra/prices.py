"""US dollars per chip and hour, on demand. A plan's price is only as good as this table: edit it, or pass `--prices`.

Source: https://cloud.google.com/tpu/pricing, lowest US region, without commitment. The page is rendered by script, so the
figures were checked against public texts that quote it: v4, v5e and v5p (2024 to 2025), v6e in us-east5 and tpu7x in
us-central1 (August 2026). Prices change and differ by region; a plan is made with what stands here.
"""

import json
import math
from pathlib import Path
from typing import Any

from infra.errors import ReproError

USD_PER_CHIP_HOUR: dict[str, float | None] = {
    "v4": 3.22,
    "v5e": 1.20,
    "v5p": 4.20,
    "v6e": 2.70,
    "tpu7x": 12.00,
}


def price_of(kind: str, table: str = "") -> float | None:
    """The price of a chip type in USD per chip and hour; None: unknown.

    `table` is a JSON file `{"v5p": 4.2, "v4": null}` that replaces entries. Zero is a price (lent chips). Raises ReproError
    that names the entry for an unknown chip and for anything but null or a finite number from 0 on.
    """
    if not table:
        return USD_PER_CHIP_HOUR.get(kind)
    remedy = 'write USD per chip and hour, for example {"v5p": 4.2}, null for unknown'
    try:
        given = json.loads(Path(table).read_bytes())
    except (OSError, ValueError, RecursionError) as e:
        raise ReproError(f"the price table {table} cannot be read: {e}", remedy) from None
    if not isinstance(given, dict):
        raise ReproError(f"the price table {table} is no JSON object", remedy)
    for chip, price in given.items():
        if chip not in USD_PER_CHIP_HOUR:
            raise ReproError(
                f"the price table {table} names an unknown chip {chip!r}",
                f"known: {', '.join(USD_PER_CHIP_HOUR)}",
            )
        if not _is_price(price):
            raise ReproError(
                f"the price table {table}: {chip} is {str(price)[:40]!r}, which is no price", remedy
            )
    found = {**USD_PER_CHIP_HOUR, **given}[kind]
    return None if found is None else float(found)


def _is_price(value: Any) -> bool:
    if value is None:
        return True
    try:
        return type(value) in (int, float) and math.isfinite(value) and value >= 0
    except OverflowError:  # an integer beyond every float
        return False
