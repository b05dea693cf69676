"""The report of a run: gather facts, judge, draw, write. `evals.report.build.build(run)` does all of it."""
