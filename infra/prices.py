"""US dollars per chip and hour, on demand. A plan's price is only as good as this table: edit it, or pass `--prices`.

Source: Google Cloud TPU pricing page, us-central1/us-east5 list prices as of 2025; tpu7x has no public list price.
"""

import json
from pathlib import Path

from infra.errors import ReproError

USD_PER_CHIP_HOUR: dict[str, float | None] = {
    "v4": 3.22,
    "v5e": 1.20,
    "v5p": 4.20,
    "v6e": 2.70,
    "tpu7x": None,
}


def price_of(kind: str, table: str = "") -> float | None:
    """The price of a chip type; `table` is a JSON file `{"v5p": 4.2}` that replaces entries. None: unknown."""
    prices = dict(USD_PER_CHIP_HOUR)
    if table:
        try:
            given = json.loads(Path(table).read_text())
            prices |= {str(k): float(v) for k, v in given.items()}
        except (OSError, ValueError, TypeError, AttributeError) as e:
            raise ReproError(f"the price table {table} cannot be read: {e}", 'write {"v5p": 4.2}') from None
    return prices.get(kind)
