"""Evaluation speed beside lm-eval's own HF model: same weights, same items, same CPU, same answers.

    python tests/benchmarks/bench_evals.py [--items 25] [--batch 1 8] [--rounds 2]

Model: the tiny recipe's shape (width 64, 4 layers, 100,352 classes), random weights, fp32, context 256. Every round runs each side once; the first
round of ours, which compiles, is timed apart. Printed: requests/s of each side and the largest difference of a log-likelihood. lm-eval's HF model needs
the package `accelerate`.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

from data.config import TokenizerConfig
from evals.config import EIGHT_TASKS
from evals.downstream import Suite
from evals.lm_eval_model import JaxLM
from evals.scoring import Scorer
from evals.tasks import quiet
from evals.text import TextTokenizer
from model.config import ModelConfig, NumericsConfig
from model.convert.hf import export_hf
from model.olmo3 import abstract_params

CONTEXT = 256


def main() -> None:
    """Run and print one JSON line per side."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--items", type=int, default=25, help="per task")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    import torch
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.set_num_threads(2)
    model = ModelConfig(d_model=64, n_layers=4, n_heads=4, n_kv_heads=4, head_dim=16, d_ff=256, window=64)
    leaves, tree = jax.tree.flatten(abstract_params(model))
    rng = np.random.default_rng(0)
    params = jax.tree.unflatten(tree, [(0.2 * rng.normal(size=s.shape)).astype(np.float32) for s in leaves])
    text = TextTokenizer(TokenizerConfig())
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        export_hf(params, model, root / "hf", context_length=CONTEXT, keep_padding=True)
        suite = Suite.load(EIGHT_TASKS, items_per_task=args.items, cache=root / "cache", max_cut_share=1.0)
        requests = [i for item in suite.items for i in item.instances]
        lm = JaxLM(Scorer.for_model(model, NumericsConfig(), context=CONTEXT), text).use(
            jax.device_put(params)
        )
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_file=str(text.inner.path), eos_token="<|endoftext|>", pad_token="<|pad|>",
            clean_up_tokenization_spaces=False,
        )  # fmt: skip
        hf = AutoModelForCausalLM.from_pretrained(root / "hf", dtype=torch.float32).eval()
        start = time.perf_counter()
        lm.loglikelihood(requests)
        print(
            json.dumps(
                {
                    "side": "ours, first call with compilation",
                    "seconds": round(time.perf_counter() - start, 2),
                }
            )
        )
        seconds: dict[str, list[float]] = {}
        answers = {}
        for _ in range(args.rounds):
            for batch in (0, *args.batch):
                name = f"lm-eval HF, batch {batch}" if batch else "ours"
                with quiet():
                    side = (
                        HFLM(
                            pretrained=hf,
                            tokenizer=tokenizer,
                            batch_size=batch,
                            max_length=CONTEXT,
                            device="cpu",
                        )
                        if batch
                        else lm
                    )
                    start = time.perf_counter()
                    answers[name] = side.loglikelihood(requests)
                    seconds.setdefault(name, []).append(time.perf_counter() - start)
        best = {name: min(times) for name, times in seconds.items()}
        for name, taken in best.items():
            worst = max(abs(a[0] - b[0]) for a, b in zip(answers["ours"], answers[name]))
            greedy = all(a[1] == b[1] for a, b in zip(answers["ours"], answers[name]))
            print(json.dumps({"side": name, "requests": len(requests), "requests_per_second": round(len(requests) / taken, 1),
                              "largest_difference_nat": worst, "same_greedy_flags": greedy}))  # fmt: skip
        theirs = min(taken for name, taken in best.items() if name != "ours")
        print(json.dumps({"times_as_fast_as_their_best": round(theirs / best["ours"], 2)}))


if __name__ == "__main__":
    main()
