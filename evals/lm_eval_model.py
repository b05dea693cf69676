"""Our JAX models as an `lm_eval.api.model.LM`: loglikelihood, rolling loglikelihood, greedy generation.

    lm = JaxLM(scorer, tokenizer)
    lm.use(params)
    lm_eval.simple_evaluate(lm, tasks=[...])

The rules, which stand in every result (`lm.rules()`):

* no BOS; an empty context becomes the one token EOS, as in lm-eval's HF model;
* the join is lm-eval's: encode(context + continuation), cut at len(encode(context)). Where a token spans the
  join so that nothing is left, the continuation is encoded alone, and the request is listed;
* too long a request first loses whole shots, the oldest first, and keeps its task description (`shots` says how many
  there are); what is still too long is cut from the left. Both are counted, never in silence; a continuation longer than
  the context is an error that names it.

The surprising thing: `generate_until` has no key-value cache; it runs the whole prefix for each token.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from lm_eval.api.model import TemplateLM

from evals.scoring import Params, Request, Scorer
from evals.text import TextTokenizer
from infra.errors import DataError

Tokenized = tuple[tuple[str, str], list[int], list[int]]


class JaxLM(TemplateLM):
    """Scores lm-eval requests with `scorer`. Set weights with `use` before asking anything."""

    def __init__(
        self, scorer: Scorer, tokenizer: TextTokenizer, *, add_bos: bool = False, shots: int = 0,
        shot_delimiter: str = "\n\n",
    ):  # fmt: skip
        super().__init__()
        if add_bos:
            raise DataError("OLMo 3 has no BOS token, so add_bos cannot be honoured", "leave it out")
        self.scorer, self.text = scorer, tokenizer
        self.params: Params | None = None
        self.shots, self.shot_delimiter = shots, shot_delimiter
        self.cuts: dict[tuple[str, str], int] = {}
        self.dropped_shots: dict[tuple[str, str], int] = {}
        self.spanned: list[tuple[str, str]] = []
        self._pairs: dict[tuple[str, str], tuple[list[int], list[int]]] = {}

    def use(self, params: Params, scorer: Scorer | None = None) -> "JaxLM":
        """Judge these weights from now on (with another model's scorer, if given)."""
        self.params = params
        self.scorer = scorer or self.scorer
        return self

    @property
    def eot_token_id(self) -> int:
        return self.text.eos_id

    @property
    def max_length(self) -> int:
        return self.scorer.context

    @property
    def tokenizer_name(self) -> str:
        return self.text.name

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return self.text.encode(string)

    def rules(self) -> dict[str, Any]:
        """What decides the numbers besides the weights."""
        return {
            "bos": "none",
            "empty_context": "one EOS token",
            "join": "lm-eval: encode(context + continuation) cut at len(encode(context))",
            "truncation": ("whole shots first, then " if self.shots else "")
            + f"left, to {self.scorer.context + 1} tokens with the continuation",
            "shots": self.shots,
            "tokenizer": {"name": self.text.name, "sha256": self.text.digest},
        }

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        key = (context, continuation)
        if key not in self._pairs:
            ids = super()._encode_pair(context, continuation)
            if not ids[1]:
                self.spanned.append(key)
                ids = (self.text.encode(context), self.text.encode(continuation))
                if not ids[1]:
                    raise DataError(
                        f"an empty continuation after {context[-60:]!r}", "fix the task's choices"
                    )
            self._pairs[key] = ids
        return self._pairs[key]

    def request_of(self, item: Tokenized) -> Request:
        """The request of one tokenized pair, cut from the left where it is too long."""
        key, context, continuation = item
        limit = self.scorer.context + 1
        if len(continuation) > self.scorer.context:
            raise DataError(
                f"a continuation of {len(continuation)} tokens does not fit the context of {self.scorer.context}: "
                f"{key[1][:60]!r}",
                "use a longer evals.context or leave the item out",
            )
        tokens = context + continuation
        if len(tokens) > limit and self.shots:
            tokens, continuation = self._without_shots(key, tokens, continuation, limit)
        if len(tokens) > limit:
            self.cuts[key] = len(tokens) - limit
            tokens = tokens[-limit:]
        return Request(np.asarray(tokens, np.int32), len(tokens) - len(continuation))

    def _without_shots(
        self, key: tuple[str, str], tokens: list[int], continuation: list[int], limit: int
    ) -> tuple[list[int], list[int]]:
        """(all ids, ids of the continuation) with as few shots dropped as needed, at most all of them.

        The parts between delimiters must be `shots` shots and the question, with or without a description before them; a
        context in which the shots cannot be told apart is left as it is, for the cut at the left.
        """
        parts = key[0].split(self.shot_delimiter)
        described = len(parts) - self.shots - 1
        if described not in (0, 1):
            return tokens, continuation
        for n in range(1, self.shots + 1):
            shorter = self.shot_delimiter.join(parts[:described] + parts[described + n :])
            context, continuation = self._encode_pair(shorter, key[1])
            tokens = context + continuation
            if len(tokens) <= limit:
                break
        self.dropped_shots[key] = n
        return tokens, continuation

    def _weights(self) -> Params:
        if self.params is None:
            raise DataError("no weights to judge", "call JaxLM.use(params) first")
        return self.params

    def _loglikelihood_tokens(self, requests: list[Tokenized], **kwargs: Any) -> list[tuple[float, bool]]:
        scored = self.scorer.score(self._weights(), [self.request_of(r) for r in requests])
        return [(s.total, bool(s.greedy.all())) for s in scored]

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        """Log-likelihood of whole texts, each token predicted once, windows as in lm-eval (EOS first)."""
        windows: list[Request] = []
        spans: list[tuple[int, int]] = []
        for (text,) in (r.args for r in requests):
            begin = len(windows)
            windows += rolling_requests(self.text.encode(text), self.eot_token_id, self.scorer.context)
            spans.append((begin, len(windows)))
        scored = self.scorer.score(self._weights(), windows) if windows else []
        return [float(sum(s.total for s in scored[a:b])) for a, b in spans]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        """Greedy text up to a stop string, EOS or `max_gen_toks` (256 unless given)."""
        return [self._generate(*r.args) for r in requests]

    def _generate(self, context: str, options: dict[str, Any]) -> str:
        if options.get("do_sample"):
            raise DataError("sampling is not offered: evaluation is greedy", "leave do_sample out")
        stops = options.get("until") or []
        stops = [stops] if isinstance(stops, str) else list(stops)
        ids = self.text.encode(context) or [self.eot_token_id]
        made: list[int] = []
        text = ""
        for _ in range(int(options.get("max_gen_toks", 256))):
            token = self.scorer.next_token(
                self._weights(), np.asarray((ids + made)[-self.scorer.context :], np.int32)
            )
            if token == self.eot_token_id:
                break
            made.append(token)
            text = self.text.decode(made)
            found = [text.index(s) for s in stops if s and s in text]
            if found:
                return text[: min(found)]
        return text


def rolling_requests(tokens: Sequence[int], prefix: int, context: int) -> list[Request]:
    """Windows that predict every token once: the first begins with `prefix`, later ones are full contexts.

    The same windows as lm-eval's `get_rolling_token_windows` with context_len 1.
    """
    if not tokens:
        return []
    stream = [prefix, *tokens]
    out = [Request(np.asarray(stream[: context + 1], np.int32), 1)]
    done = min(context, len(tokens))
    while done < len(tokens):
        new = min(context, len(tokens) - done)
        end = done + new + 1
        window = np.asarray(stream[end - context - 1 : end], np.int32)
        out.append(Request(window, len(window) - new))
        done += new
    return out
