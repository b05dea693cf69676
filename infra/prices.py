"""US dollars per chip and hour, on demand. A plan's price is only as good as this table: edit it, or pass `--prices`.

Source: https://cloud.google.com/tpu/pricing, lowest US region, without commitment. The page is rendered by script, so the
figures were checked against public texts that quote it: v4, v5e and v5p (2024 to 2025), v6e in us-east5 and tpu7x in
us-central1 (August 2026). Prices change and differ by region; a plan is made with what stands here.
"""

import json
from pathlib import Path

from infra.errors import ReproError

USD_PER_CHIP_HOUR: dict[str, float | None] = {
    "v4": 3.22,
    "v5e": 1.20,
    "v5p": 4.20,
    "v6e": 2.70,
    "tpu7x": 12.00,
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
