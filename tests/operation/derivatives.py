"""Writes out the formula of BatchNorm, and ways to differentiate a function."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from eqx_norm._normalise.reference import compute_dtype
from eqx_norm.strategies import Running
from tests.compiling import jit
from tests.helpers import copy, make, over_batch, remember

N, C, L = 4, 2, 3
MOMENTUM, BATCHES = 0.7, np.array(2)
MEAN, VARIANCE = np.array([0.5, 1.0]), np.array([2.0, 0.7])
ACTIVATIONS = {
    "none": None,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
}
RANDOM = np.random.RandomState(0)
X, DX, COTANGENT = RANDOM.standard_normal((3, N, C, L))
WEIGHT_AND_BIAS = np.array([1.5, 0.5]), np.array([0.2, -0.3])
# Where to differentiate in weight, bias and x, and along which direction of each.
POINT = *WEIGHT_AND_BIAS, X
DIRECTION = *RANDOM.standard_normal((2, C)), DX


def ours(approach, activation, run=over_batch, **arguments):
    """Returns the layer as a function of weight, bias and x."""
    arguments |= {"approach": approach, "momentum": MOMENTUM, "activation": activation}
    layer, state = make(C, "batch", **arguments)
    if approach != "variance_clip":  # which starts to clip, and differ from "batch", later
        state = remember(
            layer, state, Running.loaded(*map(jnp.asarray, (MEAN, VARIANCE, BATCHES)))
        )

    def f(weight, bias, x):
        model = eqx.tree_at(lambda m: (m.weight, m.bias), layer, (weight, bias))
        return run(model)(x, copy(state))[0]

    return f


def definition(approach, activation):
    """Returns the formula as a function of weight, bias and x."""

    def f(weight, bias, x):
        batch = x.mean((0, 2)), x.var((0, 2))
        seen = 1 - MOMENTUM ** (BATCHES + 1)
        pairs = list(zip((MEAN, VARIANCE), batch, strict=True))
        running = [m + (1 - MOMENTUM) / seen * (b - m) for m, b in pairs]
        undebiased = [m + (1 - MOMENTUM) * (b - m) for m, b in pairs]
        mixed = [seen * r + (1 - seen) * b for r, b in zip(running, batch, strict=True)]
        others = {"ema": undebiased, "adam": running, "smooth_start": mixed}
        mean, variance = others.get(approach, batch)
        y = (x - mean[:, None]) / jnp.sqrt(variance[:, None] + 1e-5)
        y = y * weight[:, None] + bias[:, None]
        return y if activation is None else activation(y)

    return f


# --- Each is given a function, its arguments, and a direction of each.


def loss_of(f):
    """Returns a sum over all that `f` returns, with other derivatives at each value."""

    def loss(*primals):
        leaves = [y.astype(compute_dtype(y.dtype)) for y in jax.tree.leaves(f(*primals))]
        return sum(jnp.sum(jnp.sin(y + 1)) for y in leaves)

    return loss


def gradient(f, primals, tangents):
    return jax.grad(loss_of(f), tuple(range(len(primals))))(*primals)


def directional(f, primals, tangents):
    return jax.jvp(f, primals, tangents)


def linearized(f, primals, tangents):
    y, linear = jax.linearize(f, *primals)
    return y, linear(*tangents), jax.linear_transpose(linear, *primals)(y)


def rematerialised(f, primals, tangents):
    return gradient(jax.checkpoint(f), primals, tangents)


def compiled_before(f, primals, tangents):
    return gradient(jax.jit(f), primals, tangents)


def scanned(f, primals, tangents):
    """Returns the gradient through layers that share their weights."""

    def layers(weight, bias, x):
        def layer(x, scale):
            return x + f(weight, bias, scale * x), None

        return jax.lax.scan(layer, x, jnp.array([1.0, 0.5, 2.0]))[0]

    return gradient(layers, primals, tangents)


def slope_of_gradient(f, primals, tangents):
    return jax.jvp(lambda *p: gradient(f, p, tangents), primals, tangents)[1]


def gradient_of_gradient(f, primals, tangents):
    return gradient(lambda *p: gradient(f, p, tangents), primals, tangents)


def hessian(f, primals, tangents):
    return jax.hessian(loss_of(f), tuple(range(len(primals))))(*primals)


def third_order(f, primals, tangents):
    def along(t):
        return loss_of(f)(*(p + t * d for p, d in zip(primals, tangents, strict=True)))

    return jax.jacfwd(jax.jacfwd(jax.jacfwd(along)))(jnp.zeros(()))


def ensemble_of_gradients(f, primals, tangents):
    stacked = [jnp.stack([p, p + d, p - d]) for p, d in zip(primals, tangents, strict=True)]
    return jax.vmap(lambda *p: gradient(f, p, tangents))(*stacked)


def gradient_of_ensemble(f, primals, tangents):
    """Shares weight and bias among all members, so that their gradients are summed."""
    x, dx = primals[2], tangents[2]
    together = jax.vmap(f, in_axes=(None, None, 0))
    return gradient(together, (*primals[:2], jnp.stack([x, x + dx, 2 * x])), tangents)


FIRST_ORDER = gradient, linearized, rematerialised, compiled_before, scanned
HIGHER = hessian, gradient_of_gradient, third_order
ENSEMBLES = ensemble_of_gradients, gradient_of_ensemble

compiled = functools.partial(jit, static_argnums=0)


def assert_agree(
    transforms, f, right, primals=POINT, tangents=DIRECTION, tolerance: Any = 1e-10
):
    """Compares all transforms of one function, which are one program, in float64."""

    @compiled
    def derive(f, primals, tangents):
        return {t.__name__: t(f, primals, tangents) for t in transforms}

    with jax.enable_x64(True):
        results, rights = derive(f, primals, tangents), derive(right, primals, tangents)
    for name, result in results.items():
        for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(rights[name]), strict=True):
            assert a.dtype == np.float64
            np.testing.assert_allclose(a, b, tolerance, tolerance, err_msg=name)
