"""The command: `PYTHONPATH=.:tests/campaigns python -m faults [--only NAME ...] [--out runs/faults] [--docs docs/faults]`.

Makes the control once, then one trial per fault, --jobs at a time in processes of their own, one line each, and writes the
record after every trial. What stands in OUT from an interrupted campaign is used again, unless --fresh. Exit status 1 when the
control is not clean, or a fault was neither caught nor classed.
"""

import argparse
import os
import shutil
import sys
import time
from pathlib import Path

from faults import page
from faults.catalogue import BY_NAME, FAULTS


def main() -> int:
    """Run the campaign."""
    parser = argparse.ArgumentParser(description="Inject each fault of the catalogue; record who notices.")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="these faults only")
    parser.add_argument(
        "--out", default="runs/faults", help="folder of the control, the trials and the report"
    )
    parser.add_argument(
        "--docs", default="", help="stem of the record kept in the repository: STEM.json and STEM.md"
    )
    parser.add_argument("--keep", action="store_true", help="keep the run directories of the trials")
    parser.add_argument("--fresh", action="store_true", help="make the control and every trial again")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="trials at a time")
    parser.add_argument("--list", action="store_true", help="print the catalogue")
    args = parser.parse_args()
    if args.list:
        print("\n".join(f"{f.section:<11} {f.name:<28} {f.words}" for f in FAULTS))
        return 0
    unknown = [n for n in args.only if n not in BY_NAME]
    if unknown:
        parser.error(f"unknown fault {unknown[0]}; --list prints them")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return campaign([BY_NAME[n] for n in args.only] or list(FAULTS), args)


def campaign(faults: list, args: argparse.Namespace) -> int:
    """Control, trials, record."""
    from faults import chain
    from infra.artifacts import read_json, versions, write_json_atomic

    out, begun = Path(args.out).resolve(), time.monotonic()
    if args.fresh:
        (out / "control.json").unlink(missing_ok=True)
        (out / "faults.json").unlink(missing_ok=True)
    chain.settle(out / "compiled")
    kept, record_file = out / "control.json", out / "faults.json"
    if kept.exists():
        control = read_json(kept)
    else:
        shutil.rmtree(out / "control", ignore_errors=True)
        control = chain.control(out / "control")
        write_json_atomic(kept, control)
    print(page.line(0, len(faults), control), flush=True)
    standing = {t["name"]: t for t in read_json(record_file)["trials"]} if record_file.exists() else {}
    for name in args.only:
        standing.pop(name, None)
    wanted = [f.name for f in faults if f.name not in standing]
    made = chain.trials(
        out / "control", wanted, out / "trials", jobs=args.jobs, cache=out / "compiled", keep=args.keep
    )
    for number, trial in enumerate(made, 1):
        standing[trial["name"]] = {**trial, "class": page.classed(trial)}
        print(page.line(number, len(wanted), standing[trial["name"]]), flush=True)
        write_json_atomic(record_file, {"trials": list(standing.values())})
    trials = [standing[f.name] for f in FAULTS if f.name in standing]
    record = {"control": control, "trials": trials, "catalogue": len(FAULTS), "cpus": os.cpu_count(), "jobs": args.jobs,
              "seconds": round(time.monotonic() - begun, 1), "made": len(wanted),
              "versions": versions("jax", "torch", "transformers", "ai2-olmo-core", "lm-eval")}  # fmt: skip
    bad = [t["name"] for t in trials if t["class"] in (page.NOT_CAUGHT, page.OTHER_VERDICT, page.BROKEN)]
    page.write(record, out, args.docs)
    if control["checks"] or bad:
        print(
            f"not caught, or broken: {', '.join(bad)}" if bad else "the control is not clean", file=sys.stderr
        )
    return int(bool(control["checks"] or bad))


if __name__ == "__main__":
    sys.exit(main())
