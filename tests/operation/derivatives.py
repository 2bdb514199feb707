"""Writes out the formula of BatchNorm, and ways to differentiate it."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from eqx_norm.strategies import Running
from tests.compiling import jit
from tests.helpers import copy, make, over_batch

N, C, L = 4, 2, 3
MOMENTUM, SEEN = 0.7, np.array(0.51)
ACTIVATIONS = {
    "none": None,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
}
RANDOM = np.random.RandomState(0)
X, DX, COTANGENT = RANDOM.standard_normal((3, N, C, L))
VECTORS, D_VECTORS = (
    (np.array([1.5, 0.5]), np.array([0.2, -0.3])),
    RANDOM.standard_normal((2, C)),
)
MEAN, VARIANCE = np.array([0.5, 1.0]), np.array([2.0, 0.7])


def arrays(dtype: Any = np.float64):
    """Returns weight, bias and x, and a direction of each."""
    primals, tangents = ((*v, x) for v, x in ((VECTORS, X), (D_VECTORS, DX)))
    return tuple(tuple(jnp.asarray(a, dtype) for a in side) for side in (primals, tangents))


def ours(approach, activation, run=over_batch):
    """Returns the layer as a function of weight, bias and x."""
    layer, state = make(C, "batch", approach=approach, momentum=MOMENTUM, activation=activation)
    memory = jax.tree.leaves(state.get(layer.memory_index))[0].dtype
    running = Running(*(jnp.asarray(a, memory) for a in (MEAN, VARIANCE, SEEN)))
    if approach != "variance_clip":  # which starts to clip, and differ from "batch", later
        state = state.set(layer.memory_index, running)

    def f(weight, bias, x):
        model = eqx.tree_at(lambda m: (m.weight, m.bias), layer, (weight, bias))
        return run(model)(x, copy(state))[0]

    return f


def definition(approach, activation):
    def f(weight, bias, x):
        return one_step(approach, activation, (weight, bias), (MEAN, VARIANCE, SEEN), x)[0]

    return f


def one_step(approach, activation, vectors, memory, x):
    weight, bias = vectors
    batch = x.mean((0, 2)), x.var((0, 2))
    *old, seen = jax.lax.stop_gradient(memory)
    seen = MOMENTUM * seen + (1 - MOMENTUM)
    running = [m + (1 - MOMENTUM) / seen * (b - m) for b, m in zip(batch, old, strict=True)]
    mean, variance = {
        "batch": batch,
        "variance_clip": batch,
        "ema": running,
        "adam": running,
        "smooth_start": [
            seen * r + (1 - seen) * b for r, b in zip(running, batch, strict=True)
        ],
    }[approach]
    y = (x - mean[:, None]) / jnp.sqrt(variance[:, None] + 1e-5)
    y = y * weight[:, None] + bias[:, None]
    y = y if activation is None else activation(y)
    return y, (*running, jnp.ones_like(seen) if approach == "ema" else seen)


def loss_of(f):
    return lambda *primals: jnp.sum(jnp.sin(f(*primals)) * COTANGENT.astype(primals[-1].dtype))


def along(f, primals, tangents):
    return lambda t: f(*(p + t * d for p, d in zip(primals, tangents, strict=True)))


def slope(f):
    return lambda t: jax.jvp(f, (t,), (jnp.ones_like(t),))[1]


EVERY = (0, 1, 2)


def gradient(f, primals, tangents):
    return jax.grad(loss_of(f), EVERY)(*primals)


def directional(f, primals, tangents):
    return jax.jvp(f, primals, tangents)


def jacobian(f, primals, tangents):
    return jax.jacfwd(f, EVERY)(*primals)


def hessian(f, primals, tangents):
    return jax.hessian(loss_of(f), EVERY)(*primals)


def linearized(f, primals, tangents):
    y, linear = jax.linearize(f, *primals)
    return y, linear(*tangents), jax.linear_transpose(linear, *primals)(y)


def rematerialised(f, primals, tangents):
    return gradient(jax.checkpoint(f), primals, tangents)


def slope_of_gradient(f, primals, tangents):
    return jax.jvp(jax.grad(loss_of(f), EVERY), primals, tangents)[1]


def gradient_of_slope(f, primals, tangents):
    return jax.grad(lambda *p: jax.jvp(loss_of(f), p, tangents)[1], EVERY)(*primals)


def gradient_of_gradient(f, primals, tangents):
    """Returns the gradient of a gradient penalty, as adversarial training has it."""
    inner = jax.grad(loss_of(f), 2)
    return jax.grad(lambda *p: jnp.sum(inner(*p) ** 2), EVERY)(*primals)


def third_order(f, primals, tangents):
    return slope(slope(slope(along(loss_of(f), primals, tangents))))(jnp.zeros(()))


def ensemble_of_gradients(f, primals, tangents):
    stacked = [jnp.stack([p, p + d, p - d]) for p, d in zip(primals, tangents, strict=True)]
    return jax.vmap(jax.grad(loss_of(f), EVERY))(*stacked)


def gradient_of_ensemble(f, primals, tangents):
    """Shares the vectors among all members, so that their gradients are summed."""
    x, dx = primals[2], tangents[2]
    together = jax.vmap(loss_of(f), in_axes=(None, None, 0))
    stacked = jnp.stack([x, x + dx, 2 * x])
    return jax.grad(lambda *p: jnp.sum(together(*p)), EVERY)(*primals[:2], stacked)


FIRST_ORDER = (gradient, directional, jacobian, linearized, rematerialised)
ENSEMBLES = (ensemble_of_gradients, gradient_of_ensemble)
HIGHER = (hessian, slope_of_gradient, gradient_of_slope, gradient_of_gradient, third_order)

compiled = functools.partial(jit, static_argnums=0)


def assert_agree(transforms, f, right, primals, tangents, **tolerance):
    """Compares all transforms of one function, which are one program."""

    @compiled
    def derive(f, primals, tangents):
        return {t.__name__: t(f, primals, tangents) for t in transforms}

    results, rights = derive(f, primals, tangents), derive(right, primals, tangents)
    for name, result in results.items():
        for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(rights[name]), strict=True):
            assert a.dtype == primals[-1].dtype
            np.testing.assert_allclose(a, b, err_msg=name, **tolerance)
