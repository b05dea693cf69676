"""300 steps on real text against OLMo-core's own model, labels, optimizer and schedulers, fp32 on CPU.

Two spikes after step 64 must be skipped by both (2,048 rows), the schedule hands over at step 150, one instance per batch is masked in
the second half. Must hold: per-step CE within 2e-5, same steps skipped, final weights within 1e-5 relative L2.

What was tried: an earlier form (settings not kept) gave 3.7e-5 with 2,048 ids, and the ids were folded to 512 after that
failure was seen. With 2,048 ids and the schedule below that figure does not come back, so the test uses 2,048 again. With no
folding at all (4,968 ids in 10,240 rows) the distance is over the limit. Measured once each, relative L2 of final weights:

                                              2,048 rows   10,240 rows
    ours to OLMo-core                           1.7e-6       1.9e-5
    OLMo-core to itself, micro-batch 2          0.6e-6       0.7e-6
    OLMo-core to itself, weights moved one ulp  0.9e-6       not run
    ours to OLMo-core in float64                0.7e-6       1.1e-6
    OLMo-core in fp32 to itself in float64      2.0e-6       1.9e-5
    the same with micro-batch 2                 1.5e-6       1.9e-5

(float64: model, loss and optimizer in double, with `Tensor.float` made to keep doubles; RoPE tables stay fp32. In 10,240 rows
CE differs by 1.9e-5 at most and neither side skips, so that run does not test skipping.)

What this shows: the distance is an error of OLMo-core's fp32 run, not of ours, and it is torch's fp32 gradient norm on CPU:
off by 1.9e-4 (median; 3.4e-4 at most), it enters through the clip factor, and Adam does not cancel it where moments are tiny,
in rarely seen embedding rows. Rounding amplified by Adam does not explain it: another micro-batch shares the 1.9e-5. With
the norm taken in float64 and everything else of OLMo-core as it is, the distance in 10,240 rows falls from 1.9e-5 to
1.8e-6 and that of CE from 1.9e-5 to 1.9e-6: the second case below.
"""

import functools
import json
import sysconfig
from pathlib import Path

import jax
import numpy as np
import pytest
import torch

from model import step as step_lib
from model.config import (
    HistoryConfig,
    LossConfig,
    MeshConfig,
    ModelConfig,
    NumericsConfig,
    OptimizerConfig,
    ScheduleConfig,
    SchedulePart,
)  # fmt: skip
from model.schedule import learning_rate
from model.sharding import make_mesh

STEPS, B, S, SPIKES = 300, 4, 64, (140, 230)
RESERVED = 32
SCHEDULE = ScheduleConfig(
    parts=(
        SchedulePart(kind="cosine", peak=3e-4, warmup=10, horizon=400, until=150),
        SchedulePart(kind="half_cosine", peak=3e-4, warmup=150, horizon=320),
    )
)


@functools.lru_cache
def batches(vocab):
    """(tokens int32[STEPS,B,S], mask bool[STEPS,B]): dolma2 tokens of the standard library, renumbered and shuffled."""
    from data.config import TokenizerConfig
    from data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(TokenizerConfig())
    ids: list[int] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        ids += tokenizer.encode(path.read_text(errors="replace"))
        if len(ids) >= STEPS * B * S:
            break
    _, dense, counts = np.unique(ids[: STEPS * B * S], return_inverse=True, return_counts=True)
    rank = np.argsort(np.argsort(-counts, kind="stable"))  # frequent tokens keep an id of their own
    folded = np.where(rank < vocab // 2, rank, vocab // 2 + rank % (vocab // 2 - RESERVED))[dense]
    rows = folded.reshape(STEPS * B, S).astype(np.int32)
    tokens = np.random.default_rng(0).permutation(rows).reshape(STEPS, B, S)
    for s in SPIKES:  # ids that occur nowhere else: a loss far above the history
        tokens[s - 1] = vocab - 1 - np.arange(B * S).reshape(B, S) % RESERVED
    mask = np.ones((STEPS, B), bool)
    mask[STEPS // 2 :, 1] = False
    return tokens, mask


def config(vocab):
    return ModelConfig(d_model=64, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=16, d_ff=128, window=16,
                       vocab_size=vocab, padded_vocab_size=vocab)  # fmt: skip


def ours(params, cfg):
    spec = step_lib.StepSpec(
        cfg,
        OptimizerConfig(),
        LossConfig(),
        NumericsConfig(loss_slice_tokens=64),
        make_mesh(MeshConfig(), jax.devices()[:1]),
    )
    state, step, log = step_lib.new_state(spec, params, HistoryConfig()), step_lib.jit_step(spec), []
    tokens, mask = batches(cfg.vocab_size)
    for s in range(1, STEPS + 1):
        numbers = step_lib.control(SCHEDULE, spec.optimizer, HistoryConfig(), s)
        batch = jax.device_put(
            step_lib.host_batch(tokens[s - 1], mask[s - 1], numbers), step_lib.batch_shardings(spec)
        )
        state, m = step(state, batch)
        log.append(m)
    return state, [{k: float(v) for k, v in m.items()} for m in log]


def theirs(params, cfg, ref, float64_norm):
    from olmo_core.data.utils import get_labels
    from olmo_core.optim.adamw import SkipStepAdamW

    model = ref.core_model(cfg, params)
    named = dict(model.named_parameters())
    rest = [p for n, p in named.items() if n != "embeddings.weight"]
    groups = [{"params": [named["embeddings.weight"]], "weight_decay": 0.0}, {"params": rest}]
    opt = SkipStepAdamW(groups, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, foreach=True)
    tokens, mask = batches(cfg.vocab_size)
    log = []
    for s in range(1, STEPS + 1):
        batch = {
            "input_ids": torch.tensor(tokens[s - 1], dtype=torch.long),
            "instance_mask": torch.tensor(mask[s - 1]),
        }
        labels = get_labels(batch)
        denominator = (labels != -100).sum() + (~batch["instance_mask"]).sum() * S
        out = model(batch["input_ids"], labels=labels, ignore_index=-100, loss_reduction="sum", z_loss_multiplier=1e-5,
                    loss_div_factor=denominator, return_logits=False)  # fmt: skip
        out.loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        exact = float(np.sqrt(sum((p.grad.double() ** 2).sum() for p in model.parameters())))
        norm = torch.tensor(exact) if float64_norm else norm
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm)
        opt.latest_loss, opt.latest_grad_norm = out.ce_loss.detach(), norm
        for group in opt.param_groups:
            group["lr"] = learning_rate(SCHEDULE, s)
        opt.step()
        opt.zero_grad(set_to_none=True)
        log.append({"ce": float(out.ce_loss), "z_loss": float(out.z_loss), "grad_norm": exact,
                    "skipped": float(opt.step_skipped)})  # fmt: skip
    return model, log


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("vocab", "float64_norm"), [(2048, False), (10240, True)])
def test_300_steps(ref, vocab, float64_norm):
    cfg = config(vocab)
    params = ref.random_params(cfg, scale=0.02)
    torch.set_num_threads(1)
    state, a = ours(params, cfg)
    model, b = theirs(params, cfg, ref, float64_norm)
    gap = {k: np.array([abs(x[k] - y[k]) for x, y in zip(a, b)]) for k in a[0]}
    norm = gap["grad_norm"] / np.array([y["grad_norm"] for y in b])
    final = ref.core_weights(cfg, model)
    pairs = list(zip(jax.tree.leaves(state["params"]), jax.tree.leaves(final)))
    l2 = np.sqrt(sum(((np.asarray(x) - y).astype(np.float64) ** 2).sum() for x, y in pairs))
    l2 /= np.sqrt(sum((y.astype(np.float64) ** 2).sum() for _, y in pairs))
    skipped = [i + 1 for i, m in enumerate(b) if m["skipped"]]
    report = {"CE max": gap["ce"].max(), "CE mean": gap["ce"].mean(), "z max": gap["z_loss"].max(),
              "norm rel max": norm.max(), "weights rel L2": l2, "skipped": skipped, "CE": [b[0]["ce"], b[-1]["ce"]]}  # fmt: skip
    print(json.dumps(report, default=float))
    assert [i + 1 for i, m in enumerate(a) if m["skipped"]] == skipped
    if vocab == 2048:  # in 10,240 rows a rare id costs no more than the history
        assert set(SPIKES) <= set(skipped)
    assert gap["ce"].max() <= 2e-5, report
    assert gap["z_loss"].max() <= 2e-8, report
    assert l2 <= 1e-5, report
