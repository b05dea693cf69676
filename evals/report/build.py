"""Write the report of a run: RUN/report/{verdict.json, index.html, report.md, report.json, figures/}.

    build(run)                                  # returns the path of index.html
    python -m evals.report.build --run RUN

Works on whatever stands: a run that stopped at the parity gate gets its report too. The surprising thing: the verdict is
judged from the same dict that `report.json` holds, so that anyone can judge it again from that file.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

from evals.report import content, html, markdown, plots
from evals.report.gather import gather, verdict_inputs
from evals.verdict import judge
from infra.artifacts import write_bytes_atomic, write_json_atomic


def build(run: Path) -> Path:
    """Gather, judge, draw and write. Returns `RUN/report/index.html`."""
    run = Path(run)
    facts = gather(run)
    inputs = plain(verdict_inputs(facts))
    verdict = judge(inputs)
    report = content.report(facts, verdict)
    out = run / "report"
    for figure in markdown.figures(report):
        write_bytes_atomic(out / "figures" / f"{figure.name}.svg", plots.for_file(figure.svg).encode())
    write_bytes_atomic(out / "index.html", html.render(report).encode())
    write_bytes_atomic(out / "report.md", markdown.render(report).encode())
    write_json_atomic(out / "report.json", plain({**facts, "verdict": verdict.to_json()}))
    short = {"comparisons": inputs["comparisons"], "bounds": facts["recipe"]["evals"]["bounds"]}
    write_json_atomic(
        out / "verdict.json", plain({**verdict.to_json(), "recipe": facts["recipe"]["name"], **short})
    )
    return out / "index.html"


def plain(value: Any) -> Any:
    """`value` as JSON types; a number that is not finite becomes None, since JSON has no NaN."""
    return json.loads(json.dumps(finite(value)))


def finite(value: Any) -> Any:
    """Numbers that are not finite as None, everywhere."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return value


def main() -> None:
    """`--run RUN`."""
    parser = argparse.ArgumentParser(description="Write the report of a run.")
    parser.add_argument("--run", type=Path, required=True)
    print(build(parser.parse_args().run))


if __name__ == "__main__":
    main()
