"""Lists layers, as functions of weight, bias, the slope of an activation, x and perhaps a mask,
each with a formula."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from eqx_norm import LayerNorm, RMSNorm
from experiments.common.exact import standardised
from tests.helpers import make
from tests.layers.norms import over_examples, with_parameters

N, C, H, W = 8, 4, 2, 3
FULL = N, C, H, W
RANDOM = np.random.RandomState(0)
MASKS = jnp.asarray(RANDOM.random_sample((2, N, 1, H, W)) < 0.6)


class Case(NamedTuple):
    """Holds a function of float64 operands, x last, its formula, operands and tangents."""

    f: Callable[..., Any]
    formula: Callable[..., Any]
    operands: tuple[np.ndarray, ...]
    tangents: tuple[np.ndarray, ...]


def case(f: Any, formula: Any, weights: tuple[int, ...]) -> Case:
    shapes = weights, weights, (), FULL
    operands, tangents = (
        tuple(1 + RANDOM.standard_normal(shape) for shape in shapes) for _ in range(2)
    )
    return Case(f, formula, operands, tangents)


def with_mask(case: Case) -> Case:
    f, formula = (functools.partial(g, mask=MASKS[0]) for g in (case.f, case.formula))
    return case._replace(f=f, formula=formula)


def silu_and_cos(u):
    """Computes a function that is neither 0 nor flat at 0, so that errors of masks show."""
    return jax.nn.silu(u) + jnp.cos(u)


def branch(slope):
    """Returns an activation that closes over a differentiated array."""
    return jax.jit(lambda u: jax.lax.cond(u.sum() > 0, jnp.sin, jnp.tanh, slope * u))


def formula(activation, axes, centred=True):
    """Returns the formula of a layer that normalises over these axes."""

    def f(weight, bias, slope, x, mask=True):
        weight, bias = (v.reshape(-1, 1, 1) if v.ndim == 1 else v for v in (weight, bias))
        u = standardised(x, axes, mask, centred=centred)[0] * weight + bias
        return jnp.where(mask, jax.vmap(activation(slope))(u), 0)

    return f


def batch_norm_of_one(weight, bias, slope, x, mask=None):
    """Returns the output of one example."""
    layer, state = make(C, "batch", approach="batch")
    mask = None if mask is None else mask[0]  # the channels share it
    return with_parameters(layer, weight, bias)(x, state, mask=mask)[0]


def batch_norm(weight, bias, slope, x, mask=None):
    places = None, None, None, 0, 0
    mapped = jax.vmap(batch_norm_of_one, places, axis_name="batch")
    return mapped(weight, bias, slope, x, mask)


def layer_norm(weight, bias, slope, x):
    layer = LayerNorm(FULL[1:], activation=branch(slope))
    return over_examples(with_parameters(layer, weight, bias), x)


def rms_norm(weight, bias, slope, x, mask=None):
    layer = with_parameters(RMSNorm(FULL[1:], activation=silu_and_cos), weight, bias)
    return over_examples(layer, x, None if mask is None else jnp.broadcast_to(mask, x.shape))


ROW = 1, 2, 3
BATCH_NORM = case(batch_norm, formula(lambda _: lambda u: u, (0, 2, 3)), (C,))
RMS_NORM = case(rms_norm, formula(lambda _: silu_and_cos, ROW, centred=False), FULL[1:])
LAYERS = {
    "BatchNorm, mask": with_mask(BATCH_NORM),
    "LayerNorm": case(layer_norm, formula(branch, ROW), FULL[1:]),
    "RMSNorm, mask": with_mask(RMS_NORM),
}
