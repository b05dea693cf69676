"""The recipe of a run that stands: its own recipe.json, with only the launch section of the command line laid over it.

    recipe = recipe_for("tiny", overrides, stored(run), run)

What a run computes was decided when it was made; where and how fast it runs may change every time. The surprising thing:
an override that only repeats what the run was made with is welcome, one that says otherwise is refused by name.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from infra.artifacts import differences
from infra.errors import IdentityError, RecipeError
from pipelines.recipe import Recipe, load_recipe, override_tree, validate
from pipelines.stages import NOT_IDENTITY, read_recipe


def launch_only(overrides: Sequence[str]) -> list[str]:
    """Those overrides that touch the launch section alone."""
    return [o for o in overrides if o.partition("=")[0].split(".")[0] == "launch"]


def stored(run_dir: str | Path) -> Recipe | None:
    """The recipe that a run directory, local or gs://, was made with; None where there is no run."""
    if not str(run_dir).startswith("gs://"):
        return read_recipe(Path(run_dir)) if (Path(run_dir) / "recipe.json").exists() else None
    from infra.storage import open_url

    bucket, prefix = open_url(str(run_dir))
    name = f"{prefix}recipe.json"
    if bucket.stat(name) is None:
        return None
    try:
        tree = json.loads(bucket.read_bytes(name)[0])
    except ValueError:
        raise IdentityError(f"{bucket.url(name)} is not JSON", "send the run's recipe.json again") from None
    return validate(tree)


def with_launch(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    """The recipe with the launch overrides among `overrides` laid over it, validated again."""
    return validate(override_tree(recipe.model_dump(mode="json"), launch_only(overrides)))


def recipe_for(name: str, overrides: Sequence[str], made: Recipe | None, where: str | Path) -> Recipe:
    """The recipe of a command on the run at `where`; without a run, the named recipe with all overrides.

    Raises RecipeError for another recipe's name (`tiny` is also what stands when none is given), IdentityError for an
    override that differs from the run.
    """
    if made is None:
        return load_recipe(name, overrides)
    if name not in ("tiny", made.name):
        raise RecipeError(
            f"{where} holds recipe {made.name!r}, not {name!r}",
            "name another --run-dir, or leave the recipe out",
        )
    was = made.model_dump(mode="json")
    wanted = override_tree(made.model_dump(mode="json"), overrides)
    found = differences(
        {k: v for k, v in was.items() if k not in NOT_IDENTITY},
        {k: v for k, v in validate(wanted).model_dump(mode="json").items() if k not in NOT_IDENTITY},
    )
    if found:
        raise IdentityError(
            f"{where} was made by another recipe; different: {', '.join(found[:8])}",
            "leave these overrides out (the run knows its own); or FRESH=1 starts over, RUN_DIR=... keeps both",
        )
    return with_launch(made, overrides)
