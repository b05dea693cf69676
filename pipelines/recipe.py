"""`Recipe`: one frozen, validated object that describes a reproduction completely.

A recipe is a named function in `pipelines/recipes/`; the command line picks the name and may override
single fields (`--set train.steps=40`). Each package owns the type of its own section. The surprising thing:
`model`, `optimizer`, `schedule`, `loss` and `history` are what *we* train, and `reference` states what the
reference trained; an override touches our side only, and the report lists every difference.
"""

import json
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from pydantic import BaseModel, ValidationError, model_validator

from data.config import CorpusConfig, DataConfig, TokenizerConfig
from evals.config import EvalConfig, ParityConfig, ReferenceConfig
from infra.artifacts import differences
from infra.config import LaunchConfig
from infra.errors import RecipeError
from infra.redact import redact, why_secret
from infra.section import Section
from model.config import (
    HistoryConfig,
    LossConfig,
    MeshConfig,
    ModelConfig,
    NumericsConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainConfig,
)

SHARED_WITH_REFERENCE = ("model", "optimizer", "schedule", "loss", "history")


class Recipe(Section):
    """A whole reproduction: corpus, data order, model, training, reference, judgement, launch."""

    name: str
    description: str
    corpus: CorpusConfig
    tokenizer: TokenizerConfig
    data: DataConfig
    model: ModelConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    loss: LossConfig
    history: HistoryConfig
    numerics: NumericsConfig
    mesh: MeshConfig
    train: TrainConfig
    reference: ReferenceConfig
    parity: ParityConfig
    evals: EvalConfig
    launch: LaunchConfig

    @model_validator(mode="after")
    def _consistent(self) -> "Recipe":
        batch = self.data.global_batch_instances
        micro = self.train.micro_batch_instances
        if micro and batch % micro:
            raise ValueError(
                f"train.micro_batch_instances {micro} does not divide data.global_batch_instances {batch}"
            )
        if batch % self.loss.reference_ranks:
            raise ValueError(
                f"loss.reference_ranks {self.loss.reference_ranks} does not divide data.global_batch_instances {batch}"
            )
        if batch % self.reference.micro_batch_instances:
            raise ValueError(
                f"reference.micro_batch_instances {self.reference.micro_batch_instances} does not divide "
                f"data.global_batch_instances {batch}"
            )
        if self.model.vocab_size != self.tokenizer.vocab_size:
            raise ValueError(
                f"model.vocab_size {self.model.vocab_size} is not tokenizer.vocab_size {self.tokenizer.vocab_size}"
            )
        for field in ("eos_id", "pad_id"):
            if (token := getattr(self.tokenizer, field)) >= self.tokenizer.vocab_size:
                raise ValueError(
                    f"tokenizer.{field} {token} lies outside the vocabulary of {self.tokenizer.vocab_size}"
                )
        domain, domains = self.evals.loss_domain, self.corpus.domains
        if domain and domains and domain not in domains:
            raise ValueError(f"evals.loss_domain {domain!r} is none of the corpus's: {', '.join(domains)}")
        prompt = self.parity.prompt_tokens or self.data.sequence_length
        if prompt <= self.reference.model.window:
            raise ValueError(
                f"parity prompts of {prompt} tokens never leave the reference's window of "
                f"{self.reference.model.window}; set parity.prompt_tokens above it"
            )
        return self

    def declared_differences(self) -> list[str]:
        """Fields in which our side is set otherwise than the reference: `model.rope_theta (500000.0 -> 10000.0)`."""
        found: list[str] = []
        for section in SHARED_WITH_REFERENCE:
            theirs = getattr(self.reference, section).model_dump(mode="json")
            found += differences(theirs, getattr(self, section).model_dump(mode="json"), section)
        return found


def recipe_names() -> list[str]:
    """The known recipe names."""
    from pipelines.recipes import RECIPES

    return sorted(RECIPES)


def load_recipe(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe called `name` with `field.path=value` overrides applied.

    Values are JSON where they parse as JSON, else strings. Raises RecipeError that names the field and the
    known choices.
    """
    from pipelines.recipes import RECIPES

    if name not in RECIPES:
        raise RecipeError(f"unknown recipe {name!r}", f"known recipes: {', '.join(recipe_names())}")
    module, function = RECIPES[name].split(":")
    make: Callable[[], Recipe] = getattr(import_module(module), function)
    return validate(override_tree(make().model_dump(mode="json"), overrides))


def override_tree(tree: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """`tree` with `field.path=value` overrides applied in place, in order; returned for convenience."""
    for override in overrides:
        _apply(tree, override)
    return tree


def validate(tree: dict[str, Any]) -> Recipe:
    """A Recipe from plain JSON values. Raises RecipeError with one line per wrong field."""
    _no_secret(tree)
    try:
        return Recipe.model_validate(tree)
    except ValidationError as e:
        lines = []
        for error in e.errors():
            where = ".".join(str(p) for p in error["loc"]) or "recipe"
            if error["type"] == "extra_forbidden":
                lines.append(f"unknown field {where}")
            elif error["type"] == "value_error":
                lines.append(str(error["ctx"]["error"]))
            else:
                lines.append(redact(f"{where}: {error['msg']} (got {error['input']!r})")[:300])
        raise RecipeError(
            "; ".join(lines), "`repro recipes NAME` prints every field with its value"
        ) from None


def _no_secret(value: Any, where: str = "") -> None:
    """Refuse a recipe that holds a credential: it is written down, shown and published with the report."""
    if isinstance(value, str) and (why := why_secret(value)):
        raise RecipeError(
            f"{where} seems to hold a secret: {why}; a recipe is written down and shown",
            "give credentials through the ordinary chain: environment variables, ~/.netrc, `gcloud auth application-default login`",
        )
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list | tuple)
        else ()
    )
    for key, v in inner:
        _no_secret(v, f"{where}.{key}".lstrip("."))


def _apply(tree: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    if not equals or not path:
        raise RecipeError(
            f"override {override!r} is not of the form field.path=value", "for example train.steps=40"
        )
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    except RecursionError:
        raise RecipeError(
            f"{path}: the value is nested too deeply", "give a value of the field's kind"
        ) from None
    node: Any = tree
    parts = path.split(".")
    for i, part in enumerate(parts):
        known = sorted(node) if isinstance(node, dict) else [str(k) for k in range(len(node))]
        if part not in known:
            where = ".".join(parts[:i]) or "the recipe"
            remedy = f"known: {', '.join(known)}" if known else f"it is empty: give all of it, {where}=JSON"
            raise RecipeError(f"unknown field {path!r}: {where} has no {part!r}", remedy)
        key: Any = part if isinstance(node, dict) else int(part)
        if i == len(parts) - 1:
            node[key] = value
        elif isinstance(node[key], dict | list):
            node = node[key]
        else:
            raise RecipeError(
                f"unknown field {path!r}: {'.'.join(parts[: i + 1])} is a single value", "drop the rest"
            )


def field_lines(value: Any, where: str = "") -> list[str]:
    """`section.field = value` lines of a recipe, for printing."""
    if isinstance(value, BaseModel):
        lines: list[str] = []
        for name in type(value).model_fields:
            lines += field_lines(getattr(value, name), f"{where}.{name}" if where else name)
        return lines
    if isinstance(value, tuple) and value and isinstance(value[0], BaseModel):
        return [line for i, v in enumerate(value) for line in field_lines(v, f"{where}.{i}")]
    return [f"{where} = {json.dumps(value)}"]
