"""The patches of model, loss and optimizer: each takes the real function and gives the mistaken one."""

import numpy as np

from faults.inject import rounded, within_trace

# ---------------------------------------------------------------- model


def per_head_norm(real):
    def branch(x, p, cfg, *rest):
        def by_head(norm):
            def faulty(y, gain, eps):
                shape = (-1, cfg.head_dim)
                return norm(y.reshape(*y.shape[:-1], *shape), gain.reshape(shape), eps).reshape(y.shape)

            return faulty

        with within_trace("model.olmo3", "rms_norm", by_head):
            return real(x, p, cfg, *rest)

    return branch


def pre_norm(real):
    def layer(x, weights, docs, *, cfg, numerics, kind, mesh=None):
        from model.olmo3 import attention_branch, mlp, rms_norm

        p = {k: v.astype(x.dtype) for k, v in weights.items()}
        y = rms_norm(x, p["attention_norm"], cfg.norm_eps)
        x = x + attention_branch(y, p, cfg, kind, docs, numerics.attention, mesh)
        return x + mlp(rms_norm(x, p["feed_forward_norm"], cfg.norm_eps), p)

    return layer


def input_normed(real):
    def branch(x, p, cfg, *rest):
        from model.olmo3 import rms_norm

        return real(rms_norm(x, p["attention_norm"], cfg.norm_eps), p, cfg, *rest)

    return branch


def cast_before_gain(real):
    def norm(x, gain, eps):
        import jax.numpy as jnp

        y = real(x, jnp.ones_like(gain), eps).astype(jnp.bfloat16)
        return (y.astype(jnp.float32) * gain).astype(x.dtype)

    return norm


def interleaved(real):
    def rotate(x, cos, sin):
        import jax.numpy as jnp

        pairs = jnp.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)
        a, b = jnp.split(real(pairs, cos, sin), 2, axis=-1)
        return jnp.stack([a, b], axis=-1).reshape(x.shape)

    return rotate


def bf16_tables(real):
    def tables(*args):
        import ml_dtypes

        return tuple(t.astype(ml_dtypes.bfloat16).astype(np.float32) for t in real(*args))

    return tables


def yarn_on_all(real):
    return lambda cfg, kind: cfg.rope_scaling


def square_root(real):
    return lambda scaling: real(scaling) ** 0.5


def own_weights(real):
    def load(directory, cfg, **options):
        from model.init import init_params

        return init_params(cfg)

    return load


def rounded_weights(real):
    import jax

    return lambda directory, cfg, **options: jax.tree.map(rounded, real(directory, cfg, **options))


# ---------------------------------------------------------------- loss


def over_all_positions(real):
    def weights(tokens, *rest):
        import jax.numpy as jnp

        labels, w = real(tokens, *rest)
        return labels, jnp.where(w > 0, 1.0 / tokens.size, 0.0)

    return weights


def over_counted(real):
    def weights(tokens, *rest):
        labels, w = real(tokens, *rest)
        return labels, (w > 0) / (w > 0).sum()

    return weights


def wrapped_label(real):
    def weights(tokens, mask, *rest):
        import jax.numpy as jnp

        labels, w = real(tokens, mask, *rest)
        asked = (w > 0).at[:, -1].set(mask)
        return labels.at[:, -1].set(tokens[:, 0]), jnp.where(asked, w.max(), 0.0)

    return weights


def exported_rows_only(real):
    return lambda x, head, *rest: real(x, head[:100278], *rest)


# ---------------------------------------------------------------- optimizer


def one_step_late(real):
    return lambda part, step: real(part, step - 1)


def rate_by_count(real):
    def apply(cfg, grads, state, params, *, loss, lr, lr_decay, cold=False):
        import jax.numpy as jnp

        from faults.chain import control_recipe
        from model.schedule import rates

        recipe = control_recipe()
        table = jnp.asarray(rates(recipe.schedule, 1, recipe.train.steps), jnp.float32)
        lr = table[(state["count"] - recipe.history.adam_count_at_start).astype(jnp.int32)]
        return real(cfg, grads, state, params, loss=loss, lr=lr, lr_decay=lr * cfg.weight_decay, cold=cold)

    return apply


def count_always(real):
    def apply(cfg, grads, state, params, **options):
        params, new, info = real(cfg, grads, state, params, **options)
        return params, {**new, "count": state["count"] + 1}, info

    return apply


def biased_std(real):
    def within(history, counted, n, latest, sigma):
        import jax.numpy as jnp

        return real(history, counted, n, latest, sigma * jnp.sqrt((n - 1) / n))

    return within


def latest_included(real):
    def within(history, counted, n, latest, sigma):
        import jax.numpy as jnp

        history = jnp.append(history, latest)
        return real(history, jnp.append(counted, True), n + 1, latest, sigma)

    return within


def skip_on_total(real):
    def train_step(spec, state, batch):
        from model import step

        grads, parts = step.gradients(spec, state["params"], batch)

        def on_total(apply):
            return lambda *args, loss, **options: apply(*args, loss=loss + parts["z"], **options)

        with (
            within_trace("model.step", "gradients", lambda _: lambda *a: (grads, parts)),
            within_trace("model.skip_step", "apply", on_total),
        ):
            return real(spec, state, batch)

    return train_step


def clipped_norm(real):
    def decide(cfg, window, loss, norm):
        import jax.numpy as jnp

        return real(cfg, window, loss, jnp.minimum(norm, 1.0))

    return decide


def forget_window(real):
    def restore(*args, **options):
        import jax

        state, meta = real(*args, **options)
        if "opt" in state:  # not where weights alone are read
            state["opt"]["window"] = jax.tree.map(lambda x: x * 0, state["opt"]["window"])
        return state, meta

    return restore


def norms_as_embeddings(real):
    return lambda path: "embeddings" if path[-1].key.endswith("norm") else real(path)


def eps_inside(real):
    def apply(cfg, grads, state, params, *, lr, lr_decay, **options):
        import jax
        import jax.numpy as jnp

        whole, new, info = real(cfg, grads, state, params, lr=lr, lr_decay=lr_decay, **options)
        bias1, bias2 = (1 - jnp.power(jnp.float32(b), state["count"] + 1) for b in cfg.betas)

        def corrected(p, m, v):
            right = m / bias1 / (jnp.sqrt(v / bias2) + cfg.eps)
            wrong = m / bias1 / jnp.sqrt(v / bias2 + cfg.eps)
            return jnp.where(info.skipped > 0, p, p + lr * (right - wrong))

        return jax.tree.map(corrected, whole, new["m"], new["v"]), new, info

    return apply


def coupled_decay(real):
    def apply(cfg, grads, state, params, *, lr_decay, **options):
        import jax

        grads = jax.tree.map(lambda g, p: g + cfg.weight_decay * p, grads, params)
        return real(cfg, grads, state, params, lr_decay=lr_decay * 0, **options)

    return apply


def less_1e_6(real):
    return lambda grads: real(grads) - 1e-6
