"""How a patch is put in place, and the patches of data, conversion and evaluation.

A patch takes the real function and gives the mistaken one; nothing is patched at import.

`applied(fault)` puts a patch in place for a while. The surprising thing: programs that JAX has traced keep the old function, so
its caches are cleared on the way in and on the way out.
"""

import contextlib
import dataclasses
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

EOS = 100257


@contextlib.contextmanager
def swapped(where: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replace `module:name` or `module:Class.name` by `make(real)`."""
    import jax

    module, _, dotted = where.partition(":")
    owner: Any = importlib.import_module(module)
    *outer, name = dotted.split(".")
    for part in outer:
        owner = getattr(owner, part)
    real = owner.__dict__[name]
    bound = getattr(owner, name) if isinstance(real, classmethod) else real
    setattr(owner, name, make(bound))
    jax.clear_caches()
    try:
        yield
    finally:
        setattr(owner, name, real)
        jax.clear_caches()


@contextlib.contextmanager
def applied(fault: Any, stage: str) -> Iterator[None]:
    """The fault's patch, if it has one that is on during `stage`."""
    if fault.patch is None or fault.during not in ("", stage):
        yield
        return
    with swapped(*fault.patch):
        yield


@contextlib.contextmanager
def within_trace(module: str, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Like `swapped`, while a function is being traced: no cache is touched."""
    owner = importlib.import_module(module)
    real = getattr(owner, name)
    setattr(owner, name, make(real))
    try:
        yield
    finally:
        setattr(owner, name, real)


def rounded(x: Any) -> np.ndarray:
    """float32 that went through bf16."""
    import ml_dtypes

    return np.asarray(x).astype(ml_dtypes.bfloat16).astype(np.float32)


# ---------------------------------------------------------------- data


def seed_less_one(real):
    return lambda n, seed: real(n, seed - 1)


def random_state(real):
    return lambda n, seed: np.random.RandomState(seed).permutation(n).astype(np.uint32)


def double_sharding(real):
    def ids(self, step):
        half = self.order[::2]
        return np.take(half, np.arange((step - 1) * self.batch, step * self.batch), mode="wrap")

    return ids


def contiguous_split(real):
    def ids(self, step):
        half = self.batch // 2
        hosts = np.split(self.order[: len(self.order) // 2 * 2], 2)
        return np.concatenate([h[(step - 1) * half : step * half] for h in hosts])

    return ids


def rows_reversed(real):
    return lambda self, step: real(self, step)[::-1]


def drop_masked(real):
    def ids(self, step):
        kept = self.order[self.index.instance_mask(self.order)]
        return kept[(step - 1) * self.batch : step * self.batch]

    return ids


def sorted_shards(real):
    def read(tokens_dir):
        manifest = real(tokens_dir)
        return {**manifest, "shards": sorted(manifest["shards"], key=lambda s: s["path"])}

    return read


def concatenated(real):
    def from_manifest(cls, tokens_dir, sequence_length, *args, filter=None, **kwargs):
        from data.masks import scan_index
        from data.token_files import TokenShard, full_digest

        apart = real(tokens_dir, sequence_length, *args, **kwargs)
        path = Path(tokens_dir) / "joined.npy"
        np.concatenate([apart.tokens_of(k) for k in range(len(apart.shards))]).tofile(path)
        size = path.stat().st_size // 4
        joined = cls([TokenShard(str(path), "all", size, full_digest(path))], sequence_length, apart.chunk)
        if filter is not None and filter.enabled:
            joined.set_mask(scan_index(joined, filter))
        return joined

    return classmethod(from_manifest)


def header_skipped(real):
    return lambda shard: np.roll(real(shard), -32)


def filter_off(real):
    return lambda self, ids: np.ones(len(ids), dtype=bool)


def document_mask(real):
    def gradients(spec, params, batch):
        import jax.numpy as jnp

        ends = (batch["tokens"] == EOS).astype(jnp.int32)
        return real(spec, params, {**batch, "doc_ids": jnp.cumsum(ends, axis=1) - ends})

    return gradients


def resume_shifted(steps):
    """On a restart, and only then, the order is shifted by `steps` batches."""

    def make(real):
        def batches(index, order, cfg, start_step=1, *rest):
            if start_step > 1:
                order = np.roll(order, steps * cfg.global_batch_instances)
            return real(index, order, cfg, start_step, *rest)

        return batches

    return make


def without_eos(real):
    def encode(tokenizer, texts):
        ids, ends = real(tokenizer, texts)
        return np.delete(ids, ends - 1), ends - np.arange(1, len(ends) + 1)

    return encode


def lower_case(real):
    return lambda self, texts: real(self, [t.lower() for t in texts])


def heldout_also_trained(real):
    def add(self, source, found):
        from data.corpus import is_heldout

        real(self, source, found)
        if hasattr(found, "text") and is_heldout(found.text, self.cfg.heldout_one_in):
            self.train.add(found, len(found.text.encode()))

    return add


# ---------------------------------------------------------------- conversion


def trade(a, b):
    """Two names of the table trade their HF names."""

    def make(table):
        return {**table, a: (table[b][0], table[a][1]), b: (table[a][0], table[b][1])}

    return make


def exchange_layers(real):
    return lambda cfg, layer: real(cfg, {1: 2, 2: 1}.get(layer, layer))


def _vocabulary(real, change):
    def rows(source, n):
        out = np.array(real(source, n))
        return change(out) if len(out) == 100352 else out

    return rows


def zero_padding(real):
    return _vocabulary(real, lambda x: np.concatenate([x[:100278], np.zeros_like(x[100278:])]))


def rows_shifted(real):
    return _vocabulary(real, lambda x: np.roll(x, 1, axis=0))


def rounded_rows(real):
    return lambda source, n: rounded(real(source, n))


def first_landmark(real):
    return lambda root, step, **options: real(root, min(_steps(root)), **options)


def _steps(root) -> list[int]:
    """Landmarks of the run that holds the checkpoints `root`."""
    from pipelines.stages import read_recipe

    return list(read_recipe(Path(root).parent).train.landmark_steps)


def late_save(*parts):
    """Save the state of the save before; with `parts`, only these parts of it."""

    def make(real):
        before: list[Any] = []

        def save(self, step, state, meta):
            import jax
            import jax.numpy as jnp

            kept = jax.tree.map(jnp.copy, state)
            stale = before[-1] if before else state
            real(self, step, {**state, **{k: stale[k] for k in parts or state}}, meta)
            before[:] = [kept]

        return save

    return make


# ---------------------------------------------------------------- evaluation


def with_bos(real):
    return lambda self, text: [EOS, *real(self, text)]


def one_token_late(real):
    def request(self, item):
        found = real(self, item)
        return dataclasses.replace(found, first=min(found.first + 1, len(found.tokens) - 1))

    return request


def padded_documents(real):
    def read(tokens_dir, *, context, **options):
        found = real(tokens_dir, context=context, **options)
        pad = lambda d: np.pad(d.tokens, (0, context - len(d.tokens)), constant_values=100277)  # noqa: E731
        return dataclasses.replace(
            found, documents=[dataclasses.replace(d, tokens=pad(d)) for d in found.documents]
        )

    return read


def low_logits(real):
    return lambda rows, block, start, vocab, low: real(rows, block, start, vocab, True)


def wrong_landmark(real):
    def find(run, side, step, model):
        first = min(_steps(Path(run) / "checkpoints"))
        return real(run, side, first if side == "reproduced" else step, model)

    return find


def reference_twice(real):
    return lambda run, side, step, model: real(run, "reference", step, model)
