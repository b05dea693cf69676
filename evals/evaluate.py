"""Evaluate the landmarks of a run: four surfaces, both sides, one process.

    evaluator = Evaluator(run, EvaluateSpec(...))       # builds documents, items and compiled shapes once
    evaluator.landmark(16)                              # writes evals/step16/*.json, reuses what stands

    evaluate_run(run)                                   # all landmarks of RUN/recipe.json

Every result carries the fingerprint of what made it: weights by content, model, numerics, documents or prompts, code and
library versions. A result whose fingerprint still holds is reused, also when it was computed elsewhere for the same
reference checkpoint; any other is made again. The surprising thing: the two sides keep their own model
config, so that a wrong `model.rope_theta` on our side is judged as what it is.
"""

import time
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from data.config import CorpusConfig, TokenizerConfig
from evals.config import EvalConfig
from evals.heldout import HeldoutSet, read_documents
from evals.heldout import evaluate as evaluate_heldout
from evals.heldout import summary as heldout_summary
from evals.scoring import Params, Scorer
from evals.text import TextTokenizer
from evals.token_kl import PairScorer
from evals.token_kl import evaluate as evaluate_pair
from infra.artifacts import digest_tree, fingerprint, read_json, versions, write_json_atomic
from infra.code import code_digest
from infra.errors import DataError, IdentityError
from infra.progress import Progress
from model.config import ModelConfig, NumericsConfig, TrainConfig

SIDES = ("reference", "reproduced")
FILES = (
    "reference.heldout",
    "reproduced.heldout",
    "token_kl",
    "reference.downstream",
    "reproduced.downstream",
)
INLOOP_FILES = tuple(f"{side}.inloop" for side in SIDES)  # only where the recipe names in-loop tasks


@dataclass(frozen=True)
class EvaluateSpec:
    """What evaluation needs of a recipe."""

    model: ModelConfig
    reference_model: ModelConfig
    numerics: NumericsConfig
    tokenizer: TokenizerConfig
    evals: EvalConfig
    sequence_length: int
    landmarks: tuple[int, ...]
    heldout: str = "heldout"  # folder below tokens/: the corpus's own held-out side, or a validation mix

    @property
    def context(self) -> int:
        return self.evals.context or self.sequence_length

    @classmethod
    def from_recipe(cls, recipe: dict[str, Any]) -> "EvaluateSpec":
        """From the JSON of a recipe."""
        return cls(
            ModelConfig.model_validate(recipe["model"]),
            ModelConfig.model_validate(recipe["reference"]["model"]),
            NumericsConfig.model_validate(recipe["numerics"]),
            TokenizerConfig.model_validate(recipe["tokenizer"]),
            EvalConfig.model_validate(recipe["evals"]),
            recipe["data"]["sequence_length"],
            TrainConfig.model_validate(recipe["train"]).landmark_steps,
            CorpusConfig.model_validate(recipe["corpus"]).judged,
        )


@dataclass
class Weights:
    """One set of weights: where it lies, whose config it has, its content digest, and how to load it."""

    directory: Path
    model: ModelConfig
    digest: str
    _params: Params | None = field(default=None, repr=False)

    def load(self) -> Params:
        """The parameter tree on the default device, read once."""
        if self._params is None:
            import jax

            self._params = jax.device_put(self._read())
        return self._params

    def _read(self) -> Params:
        if (self.directory / "params").is_dir():
            from model.checkpoint import restore_params

            params, stored = restore_params(
                self.directory.parent, int(self.directory.name.removeprefix("step"))
            )
            if stored != self.model:
                raise IdentityError(
                    f"{self.directory} holds a model with another config than the recipe's",
                    "evaluate with the recipe that trained it",
                )
            return params
        from model.convert.hf import import_hf

        return import_hf(self.directory, self.model)


def find_weights(run: Path, side: str, step: int, model: ModelConfig) -> Weights:
    """The weights of one side at a landmark: the reference's HF export, our checkpoint, or our HF export."""
    places = (
        [run / "reference" / "hf" / f"step{step}"]
        if side == "reference"
        else [run / "checkpoints" / f"step{step}", run / "hf" / f"step{step}"]
    )
    for place in places:
        root = place / "params" if (place / "params").is_dir() else place
        if root.is_dir() and any(root.iterdir()):
            files = digest_tree(root)
            kept = {n: f["sha256"] for n, f in files.items() if root != place or n.endswith(".safetensors")}
            if kept:
                return Weights(place, model, fingerprint(kept))
    raise DataError(
        f"there are no {side} weights of step {step} ({' or '.join(str(p) for p in places)})",
        f"run the stage that makes them: `repro {'reference' if side == 'reference' else 'train'}`",
    )


class Evaluator:
    """Built once per run; `landmark` may be called for many steps and compiles nothing new."""

    def __init__(self, run: Path, spec: EvaluateSpec, *, cache: Path | None = None):
        self.run, self.spec = Path(run), spec
        self.cache = Path(cache) if cache else self.run / ".cache" / "evals"
        self.seconds: dict[str, float] = {}
        self._scorers: dict[str, Scorer] = {}

    @cached_property
    def text(self) -> TextTokenizer:
        return TextTokenizer(self.spec.tokenizer)

    @cached_property
    def heldout(self) -> HeldoutSet:
        """The held-out documents, read once."""
        return read_documents(
            self.run / "tokens" / self.spec.heldout, context=self.spec.context,
            per_domain=self.spec.evals.heldout_documents, eos_id=self.spec.tokenizer.eos_id,
            byte_lengths=self.text.byte_lengths(self.spec.reference_model.padded_vocab_size),
        )  # fmt: skip

    @cached_property
    def suite(self) -> Any:
        """The downstream items and prompts, built once."""
        from evals.downstream import Suite

        cfg = self.spec.evals
        return Suite.load(
            cfg.tasks, items_per_task=cfg.items_per_task, cache=self.cache, max_cut_share=cfg.max_cut_share
        )

    @cached_property
    def inloop(self) -> Any:
        """AI2's in-loop requests, built once."""
        from evals.inloop import InLoopSuite

        cfg = self.spec.evals
        return InLoopSuite.load(
            cfg.inloop_tasks, self.text, context=self.spec.context, items_per_task=cfg.inloop_items, cache=self.cache
        )  # fmt: skip

    @cached_property
    def lm(self) -> Any:
        """The lm-eval model; its weights change, its tokenized requests stay."""
        from evals.lm_eval_model import JaxLM

        return JaxLM(self.scorer(self.spec.reference_model), self.text)

    def scorer(self, model: ModelConfig) -> Scorer:
        """One scorer per model config."""
        key = fingerprint(model)
        if key not in self._scorers:
            self._scorers[key] = Scorer.for_model(
                model,
                self.spec.numerics,
                context=self.spec.context,
                batch_tokens=self.spec.evals.batch_tokens,
            )
        return self._scorers[key]

    @cached_property
    def pair(self) -> PairScorer:
        return PairScorer(self.scorer(self.spec.reference_model), self.scorer(self.spec.model))

    @cached_property
    def common(self) -> dict[str, Any]:
        """What every result depends on besides weights and questions."""
        return {
            "numerics": self.spec.numerics.model_dump(mode="json"),
            "context": self.spec.context,
            "batch_tokens": self.spec.evals.batch_tokens,
            "tokenizer": self.text.digest,
            "versions": versions("jax", "jaxlib", "numpy"),
        }

    def landmark(self, step: int) -> dict[str, Path]:
        """All results of one landmark. Returns their files by name; what stands with the same fingerprint stays."""
        sides = {
            "reference": find_weights(self.run, "reference", step, self.spec.reference_model),
            "reproduced": find_weights(self.run, "reproduced", step, self.spec.model),
        }
        out = {name: self.run / "evals" / f"step{step}" / f"{name}.json" for name in FILES}
        self._pair(step, sides, out)
        self._two_by_two(step, sides)
        for side, weights in sides.items():
            self._downstream(step, side, weights, out[f"{side}.downstream"])
            if self.spec.evals.inloop_tasks:
                self._inloop(step, side, weights)
        if step == self.spec.landmarks[-1]:
            self._spot_check(step, sides, out)
        return out

    def _identity(self, kind: str, questions: Any, *weights: Weights) -> dict[str, Any]:
        return {
            "kind": kind,
            "weights": [w.digest for w in weights],
            "models": [w.model.model_dump(mode="json") for w in weights],
            "questions": questions,
            "code": code_digest(f"evals.{kind}"),
            **self.common,
        }

    def _pair(self, step: int, sides: dict[str, Weights], out: dict[str, Path]) -> None:
        documents = self.heldout.digest
        keys = {
            "token_kl": self._identity("token_kl", documents, *sides.values()),
            **{f"{s}.heldout": self._identity("heldout", documents, w) for s, w in sides.items()},
        }
        if all(stands(out[name], key) for name, key in keys.items()):
            return
        start = time.monotonic()
        losses: dict[str, list[float]] = {}
        losses["reference"], losses["reproduced"], kl = evaluate_pair(
            self.pair, sides["reference"].load(), sides["reproduced"].load(), self.heldout
        )
        seconds = time.monotonic() - start
        self.seconds[f"step{step}.heldout_and_kl"] = round(seconds, 2)
        write(out["token_kl"], step, "both", keys["token_kl"], kl)
        for side in SIDES:
            result = heldout_summary(self.heldout, losses[side])
            write(out[f"{side}.heldout"], step, side, keys[f"{side}.heldout"], result)

    def _two_by_two(self, step: int, sides: dict[str, Weights]) -> None:
        """The 2x2 on a few documents, where both sides lie as HF exports on this machine and torch is there."""
        places = self.run / "reference" / "hf" / f"step{step}", self.run / "hf" / f"step{step}"
        per_domain = self.spec.evals.torch_documents
        if not per_domain or not all(p.is_dir() for p in places):
            return
        from evals.two_by_two import few, measure

        documents = few(self.heldout, per_domain)
        path = self.run / "evals" / f"step{step}" / "two_by_two.json"
        key = self._identity("two_by_two", documents.digest, *sides.values())
        if stands(path, key):
            return
        start = time.monotonic()
        pair = [sides[s] for s in SIDES]
        scorers = self.scorer(pair[0].model), self.scorer(pair[1].model)
        result = measure(places, scorers, (pair[0].load(), pair[1].load()), documents)
        self.seconds[f"step{step}.two_by_two"] = round(time.monotonic() - start, 2)
        write(path, step, "both", key, result)

    def _downstream(self, step: int, side: str, weights: Weights, out: Path) -> None:
        key = self._identity("downstream", self.suite.identity, weights)
        if stands(out, key):
            return
        start = time.monotonic()
        result = self.suite.run(self.lm.use(weights.load(), self.scorer(weights.model)))
        seconds = time.monotonic() - start
        self.seconds[f"step{step}.{side}.downstream"] = round(seconds, 2)
        write(out, step, side, key, result)

    def _spot_check(self, step: int, sides: dict[str, Weights], results: dict[str, Path]) -> None:
        """Some scores of the last landmark again, by lm-eval's and transformers' own code, where exports lie here."""
        from evals.spot_check import exported, measure

        places, items = exported(self.run, step, SIDES), self.spec.evals.spot_items
        if not places or not items:
            return
        path = self.run / "evals" / f"step{step}" / "spot_check.json"
        asked = self if self.spec.numerics.mode == "fp32" else self._in_fp32(items)
        scores = {s: {k: read_json(results[f"{s}.{k}"]) for k in ("heldout", "downstream")} for s in places}
        questions = {
            "items": items,
            "numerics": asked.spec.numerics.mode,
            "scores": {s: [r["fingerprint"] for r in scores[s].values()] for s in scores},
        }
        key = self._identity("spot_check", questions, *(sides[s] for s in places))
        if stands(path, key):
            return
        start = time.monotonic()
        if asked is not self:
            scores = {s: asked.scores_of(sides[s]) for s in places}
        result = measure(
            places, scores, asked.suite, self.run / "tokens" / self.spec.heldout, self.spec.tokenizer,
            context=self.spec.context, items=items,
        )  # fmt: skip
        self.seconds[f"step{step}.spot_check"] = round(time.monotonic() - start, 2)
        write(path, step, "both", key, {"numerics": asked.spec.numerics.mode, **result})

    def _in_fp32(self, items: int) -> "Evaluator":
        """The same programs in fp32 on few questions: a bf16 score says nothing about 1e-4 nat."""
        few = self.spec.evals.model_copy(update={"items_per_task": items, "heldout_documents": max(2, items)})
        spec = replace(self.spec, numerics=NumericsConfig(), evals=few)
        return Evaluator(self.run, spec, cache=self.cache)

    def scores_of(self, weights: Weights) -> dict[str, Any]:
        """Held-out and downstream results of one set of weights, kept nowhere."""
        scorer = self.scorer(weights.model)
        losses = evaluate_heldout(scorer, weights.load(), self.heldout)
        return {
            "heldout": heldout_summary(self.heldout, losses),
            "downstream": self.suite.run(self.lm.use(weights.load(), scorer)),
        }

    def _inloop(self, step: int, side: str, weights: Weights) -> None:
        """AI2's in-loop tasks: shown in the report, not part of the verdict."""
        out = self.run / "evals" / f"step{step}" / f"{side}.inloop.json"
        key = self._identity("inloop", self.inloop.identity, weights)
        if stands(out, key):
            return
        start = time.monotonic()
        result = self.inloop.run(self.scorer(weights.model), weights.load())
        self.seconds[f"step{step}.{side}.inloop"] = round(time.monotonic() - start, 2)
        write(out, step, side, key, result)


def stands(path: Path, identity: dict[str, Any]) -> bool:
    """Whether a result with this identity is there."""
    return path.exists() and read_json(path).get("fingerprint") == fingerprint(identity)


def write(path: Path, step: int, side: str, identity: dict[str, Any], result: dict[str, Any]) -> None:
    """A result with its identity, atomically. No clock goes in: two evaluations of the same thing are byte-equal."""
    record = {
        "step": step,
        "side": side,
        "fingerprint": fingerprint(identity),
        "identity": identity,
        **result,
    }
    write_json_atomic(path, record)


def evaluate_landmark(run: Path, step: int, spec: EvaluateSpec | None = None) -> dict[str, Path]:
    """One landmark on its own (an `Evaluator` is cheaper for several)."""
    return Evaluator(run, spec or EvaluateSpec.from_recipe(read_json(run / "recipe.json"))).landmark(step)


def evaluate_run(
    run: Path, spec: EvaluateSpec | None = None, *, cache: Path | None = None
) -> dict[str, float]:
    """Every landmark of a run. Returns the seconds of what was computed."""
    spec = spec or EvaluateSpec.from_recipe(read_json(run / "recipe.json"))
    evaluator = Evaluator(run, spec, cache=cache)
    progress = Progress("evaluate", len(spec.landmarks), "landmarks")
    progress.update(0, "documents and items")
    for i, step in enumerate(spec.landmarks):
        evaluator.landmark(step)
        progress.update(i + 1, f"step {step}")
    progress.finish()
    timings = run / "evals" / "timings.json"
    before = read_json(timings) if timings.exists() else {}
    write_json_atomic(timings, {**before, **evaluator.seconds})
    return evaluator.seconds
