"""What Prefect's UI shows of a run: verdict, landmarks, progress, key plots, links to report and logs.

The surprising thing: a browser does not open file links from a page of a server, so links go to the small file server that
`repro serve` runs (REPRO_FILES_URL); without it the paths are shown as text.
"""

import json
import logging
import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

from infra.artifacts import read_json
from infra.errors import ReproError
from pipelines.landmarks import survey
from pipelines.recipe import Recipe

_last: dict[str, str] = {}
COPIES, COPIES_SHOWN_AS = ".gs", "bucket-runs"  # working copies of gs:// runs, on disk and in links


def publish(run: Path, recipe: Recipe) -> None:
    """Create or renew the artifacts of a run; an unchanged one is not sent again.

    Showing is not doing: a server that does not answer costs a log line and never the run.
    """
    key = re.sub(r"[^a-z0-9]+", "-", run.name.lower()).strip("-") or "run"
    try:
        _markdown(f"progress-{key}", progress_text(run, recipe), "how far the run is")
        _table(f"landmarks-{key}", landmark_rows(run, recipe), "landmarks and how they stand")
        if (run / "report" / "verdict.json").exists():
            _table(f"verdict-{key}", verdict_rows(run), "verdict so far")
            _markdown(f"report-{key}", report_text(run), "report, plots and logs")
    except ReproError as e:
        logging.getLogger(__name__).warning("artifacts: %s", e.what)
    except Exception as e:
        logging.getLogger(__name__).warning("artifacts were not shown: %s: %s", type(e).__name__, e)


def _new(key: str, value: Any) -> bool:
    text = json.dumps(value, sort_keys=True)
    if _last.get(key) == text:
        return False
    _last[key] = text
    return True


def _markdown(key: str, text: str, description: str) -> None:
    if _new(key, text):
        from prefect.artifacts import create_markdown_artifact

        create_markdown_artifact(text, key=key, description=description)


def _table(key: str, rows: list[dict[str, Any]], description: str) -> None:
    if rows and _new(key, rows):
        from prefect.artifacts import create_table_artifact

        create_table_artifact(rows, key=key, description=description)


def link(run: Path, relative: str) -> str:
    """A link to a file of the run, or its path."""
    base, root = os.environ.get("REPRO_FILES_URL", ""), os.environ.get("REPRO_FILES_ROOT", "")
    path = (run / relative).resolve()
    if base and root and path.is_relative_to(root):
        first, *rest = path.relative_to(root).parts
        shown = [COPIES_SHOWN_AS if first == COPIES else first, *rest]
        return f"[{relative}]({base}/{quote('/'.join(shown))})"
    return f"`{path}`"


def last_metrics(run: Path) -> dict[str, Any]:
    """The newest complete line of the training log; empty before the first."""
    path = run / "train" / "metrics.jsonl"
    if not path.exists():
        return {}
    with path.open("rb") as f:
        f.seek(max(0, path.stat().st_size - 4096))
        lines = f.read().split(b"\n")
    whole = [x for x in lines[:-1] if x.startswith(b"{")]
    return json.loads(whole[-1]) if whole else {}


def progress_text(run: Path, recipe: Recipe) -> str:
    """Stages and the training step, as Markdown."""
    from pipelines.stages import STAGES

    done = {s.name for s in STAGES if (run / "stages" / f"{s.name}.json").exists()}
    begun = {s.name for s in STAGES if (run / "stages" / f"{s.name}.begun.json").exists()} - done
    lines = [
        f"**{run}**, recipe `{recipe.name}`: {len(done)} of {len(STAGES)} stages done",
        "",
        "| stage | state |",
        "|---|---|",
    ]
    lines += [
        f"| {s.name} | {'done' if s.name in done else 'begun' if s.name in begun else ''} |" for s in STAGES
    ]
    metrics = last_metrics(run)
    if metrics:
        share = 100 * metrics["step"] / recipe.train.steps
        lines += [
            "",
            f"training: step {metrics['step']} of {recipe.train.steps} ({share:.0f} %), CE {metrics['ce']}",
        ]
    logs = sorted((run / "logs").glob("*.log")) if (run / "logs").is_dir() else []
    if logs:
        lines += ["", "logs: " + ", ".join(link(run, f"logs/{p.name}") for p in logs)]
    return "\n".join(lines)


def landmark_rows(run: Path, recipe: Recipe) -> list[dict[str, Any]]:
    """One row per landmark."""
    return [{"step": m.step, "state": m.state, "detail": m.detail} for m in survey(run, recipe)]


def verdict_rows(run: Path) -> list[dict[str, Any]]:
    """One row per landmark and surface: difference, interval, bound, and the verdict of the surface."""
    verdict = read_json(run / "report" / "verdict.json")
    rows = [{"step": "overall", "surface": "", "verdict": verdict["overall"]}]
    for step, surfaces in sorted(verdict.get("comparisons", {}).items(), key=lambda x: int(x[0])):
        for name, found in surfaces.items():
            if isinstance(found, dict):
                shown = {k: found[k] for k in ("difference", "low", "high", "bound", "verdict") if k in found}
                rows.append({"step": step, "surface": name, **shown})
    return rows


def report_text(run: Path) -> str:
    """Links to the report, and its plots."""
    lines = [f"report: {link(run, 'report/index.html')}, {link(run, 'report/report.md')}"]
    base = os.environ.get("REPRO_FILES_URL", "")
    for figure in sorted((run / "report" / "figures").glob("*.svg"))[:6]:
        shown = link(run, f"report/figures/{figure.name}")
        lines += ["", ("!" if base and shown.startswith("[") else "") + shown]
    return "\n".join(lines)
