"""Evaluation speed beside lm-eval's own HF model: same weights, same items, same CPU, same answers.

    python tests/benchmarks/bench_evals.py [--items 4] [--batch 1 8] [--rounds 3] [--limit 420] [--threads 2]

Model: the tiny recipe's shape (width 64, 4 layers, 100,352 classes), random weights, fp32, context 256. Every round runs each side once, in
turn, until `--rounds` or `--limit` seconds are reached (a round that has begun is finished); the first call of ours, which compiles, is timed
apart. Printed: medians of requests per second, wall and CPU, and the largest difference of a log-likelihood. lm-eval's HF model needs the
package `accelerate`. The surprising thing: more items make ours faster per request and theirs not, since compiled shapes are filled better.

Our other way is timed beside it: contexts that are shared run once, or every input whole; a scorer chooses by the width of its model.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from data.config import TokenizerConfig
from evals import scoring
from evals.config import EIGHT_TASKS
from evals.downstream import Suite
from evals.lm_eval_model import JaxLM
from evals.scoring import Request, Scorer
from evals.tasks import quiet
from evals.text import TextTokenizer
from model.config import ModelConfig, NumericsConfig
from model.convert.hf import export_hf
from model.olmo3 import abstract_params

CONTEXT = 256
TRIES = {True: "contexts shared", False: "nothing shared"}


def input_tokens(scorer: Scorer, requests: list[Request]) -> int:
    """Tokens that the body runs for these requests, padding left out."""
    plan = scoring._plan(scorer, requests)
    alone = sum(len(requests[r].tokens) - 1 for members in plan.order.values() for r in members)
    last = (next(reversed(row.begins)) for row in plan.tries)
    return alone + sum(row.column(r, len(requests[r].tokens) - 2) + 1 for row, r in zip(plan.tries, last))


def main() -> None:
    """Run and print one JSON line per side."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--items", type=int, default=4, help="per task")
    parser.add_argument("--width", type=int, default=64, help="d_model; heads of 16, four layers")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=420.0, help="seconds after which no new round begins")
    parser.add_argument(
        "--threads", type=int, default=2, help="of torch; on a busy machine 1 is fairer to it"
    )
    args = parser.parse_args()
    import torch
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.set_num_threads(args.threads)
    heads = args.width // 16
    model = ModelConfig(
        d_model=args.width,
        n_layers=4,
        n_heads=heads,
        n_kv_heads=heads,
        head_dim=16,
        d_ff=4 * args.width,
        window=64,
    )
    leaves, tree = jax.tree.flatten(abstract_params(model))
    rng = np.random.default_rng(0)
    params = jax.tree.unflatten(
        tree, [(1.6 / args.width**0.5 * rng.normal(size=s.shape)).astype(np.float32) for s in leaves]
    )
    text = TextTokenizer(TokenizerConfig())
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        export_hf(params, model, root / "hf", context_length=CONTEXT, keep_padding=True)
        suite = Suite.load(EIGHT_TASKS, items_per_task=args.items, cache=root / "cache", max_cut_share=1.0)
        requests = [i for item in suite.items for i in item.instances]
        scorer, ours = (
            Scorer.for_model(model, NumericsConfig(), context=CONTEXT),
            jax.device_put(params),
        )
        other = Scorer.for_model(model, NumericsConfig(), context=CONTEXT, share=not scorer.shares)
        lm = JaxLM(scorer, text).use(ours)
        asked: list[Request] = []
        plain_score = scorer.score
        scorer.score = lambda p, r: (asked.extend(r), plain_score(p, r))[1]  # type: ignore[method-assign]
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_file=str(text.inner.path), eos_token="<|endoftext|>", pad_token="<|pad|>",
            clean_up_tokenization_spaces=False,
        )  # fmt: skip
        hf = AutoModelForCausalLM.from_pretrained(root / "hf", dtype=torch.float32).eval()
        start = time.perf_counter()
        lm.loglikelihood(requests)
        first = time.perf_counter() - start
        JaxLM(other, text).use(ours).loglikelihood(requests)
        scorer.score = plain_score  # type: ignore[method-assign]
        print(
            json.dumps(
                {
                    "side": "ours, first call with compilation",
                    "seconds": round(first, 2),
                }
            )
        )
        seconds: dict[str, list[tuple[float, float]]] = {}
        answers: dict[str, list[tuple[float, bool]]] = {}
        begin = time.perf_counter()
        with quiet():
            sides: dict[str, Any] = {"ours": lm, f"ours, {TRIES[other.shares]}": JaxLM(other, text).use(ours)} | {
                f"lm-eval HF, batch {b}": HFLM(pretrained=hf, tokenizer=tokenizer, batch_size=b, max_length=CONTEXT, device="cpu")
                for b in args.batch
            }  # fmt: skip
            for _ in range(args.rounds):
                for name, side in sides.items():
                    start, cpu = time.perf_counter(), time.process_time()
                    answers[name] = side.loglikelihood(requests)
                    took = time.perf_counter() - start, time.process_time() - cpu
                    seconds.setdefault(name, []).append(took)
                if time.perf_counter() - begin > args.limit:
                    break
        middle = {
            n: tuple(statistics.median(t[k] for t in times) for k in (0, 1)) for n, times in seconds.items()
        }
        for name, (wall, cpu) in middle.items():
            worst = max(abs(a[0] - b[0]) for a, b in zip(answers["ours"], answers[name]))
            greedy = all(a[1] == b[1] for a, b in zip(answers["ours"], answers[name]))
            print(json.dumps({"side": name, "rounds": len(seconds[name]), "requests": len(requests), "requests_per_second": round(len(requests) / wall, 1),
                              "requests_per_cpu_second": round(len(requests) / cpu, 1), "largest_difference_nat": worst,
                              "same_greedy_flags": greedy}))  # fmt: skip
        theirs = [min(times[k] for name, times in middle.items() if "HF" in name) for k in (0, 1)]
        ratio = [round(theirs[k] / middle["ours"][k], 2) for k in (0, 1)]
        alone = middle[f"ours, {TRIES[other.shares]}"]
        print(json.dumps({"input_tokens": {TRIES[s.shares]: input_tokens(s, asked) for s in (scorer, other)},
                          "times_our_other_way_wall": round(alone[0] / middle["ours"][0], 2),
                          "times_our_other_way_cpu": round(alone[1] / middle["ours"][1], 2)}))  # fmt: skip
        print(
            json.dumps(
                {"times_their_best_wall": ratio[0], "times_their_best_cpu": ratio[1], "load": os.getloadavg()}
            )
        )


if __name__ == "__main__":
    main()
