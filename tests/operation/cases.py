"""Lists passes over x, and layers, each with a formula."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from eqx_norm import LayerNorm
from eqx_norm._normalise import elementwise
from eqx_norm._normalise.layout import Blocks
from eqx_norm._normalise.passes import bind
from eqx_norm._normalise.primitives import AFFINE, MOMENTS, STATISTICS, SUMS
from tests.helpers import make

N, C, H, W = 8, 4, 2, 3
EPS = 1e-5
FULL, COLUMN = (N, C, H, W), (1, C, 1, 1)
RANDOM = np.random.RandomState(0)


class Case(NamedTuple):
    """Holds a function of float64 operands, x last, its formula, operands and tangents."""

    f: Callable[..., Any]
    formula: Callable[..., Any]
    operands: tuple[np.ndarray, ...]
    tangents: tuple[np.ndarray, ...]
    masks: tuple[np.ndarray, ...] = ()  # one more operand, for two members

    @property
    def with_mask(self) -> "Case":
        """Returns the case with its mask as a constant, if it has one."""
        if not self.masks:
            return self
        f, formula = (functools.partial(g, mask=self.masks[0]) for g in (self.f, self.formula))
        return self._replace(f=f, formula=formula)


def case(f: Any, formula: Any, *shapes: tuple[int, ...], masks: Any = ()) -> Case:
    operands, tangents = (
        tuple(1 + RANDOM.standard_normal(shape) for shape in shapes) for _ in range(2)
    )
    return Case(f, formula, operands, tangents, masks)


# --- Passes over x, which take and return vectors as columns with one number per channel.

BLOCKS = Blocks(3, C)
SUMMED = (0, 2, 3)


def moments(x, mask=None):
    options: Any = {"blocks": BLOCKS, "shape": COLUMN, "names": ()}
    how: Any = {"implementation": "auto", "differentiated": True}
    count, mean, m2, rest = bind(STATISTICS, jax.lax.stop_gradient(x), mask, **how, **options)
    options |= {"mesh": (), "centred": True}
    mean, m2 = bind(MOMENTS, x, x, mean, rest, m2, count, mask, **options)
    return mean + rest, m2


def sums(g, mean, rest, x, mask=None, *, both=True):
    return bind(SUMS, g, x, mean, rest, mask, blocks=BLOCKS, shape=COLUMN, both=both)


def affine(bias, scale, mean, rest, x, mask=None):
    return bind(AFFINE, bias, scale, x, x, mean, rest, mask, blocks=BLOCKS)[0]


def silu_and_cos(u):
    """Computes a function that is neither 0 nor flat at 0, so that errors of masks show."""
    return jax.nn.silu(u) + jnp.cos(u)


def activated(bias, scale, mean, rest, x, mask=None):
    return elementwise.activated(silu_and_cos, BLOCKS, [bias, scale, mean, rest], x, x, mask)


def moments_formula(x, mask=True):
    """Returns mean and m2."""
    mean = x.mean(SUMMED, keepdims=True, where=mask)
    return mean, jnp.sum((x - mean) ** 2, SUMMED, keepdims=True, where=mask)


def sums_formula(g, mean, rest, x, mask=True, *, both=True):
    products = [g, g * (x - mean - rest)][not both :]
    return [v.sum(SUMMED, keepdims=True, where=mask) for v in products]


def affine_formula(bias, scale, mean, rest, x, mask=True, *, function=lambda u: u):
    return jnp.where(mask, function(bias + scale * (x - mean - rest)), 0)


activated_formula = functools.partial(affine_formula, function=silu_and_cos)
second_sum, second_formula = (functools.partial(f, both=False) for f in (sums, sums_formula))
FOR_SUMS, FOR_AFFINE = (FULL, COLUMN, COLUMN, FULL), (*(COLUMN,) * 4, FULL)


def passes(masks=()):
    return {
        "moments": case(moments, moments_formula, FULL, masks=masks),
        "sums": case(sums, sums_formula, *FOR_SUMS, masks=masks),
        "second sum": case(second_sum, second_formula, *FOR_SUMS, masks=masks),
        "affine": case(affine, affine_formula, *FOR_AFFINE, masks=masks),
        "activated": case(activated, activated_formula, *FOR_AFFINE, masks=masks),
    }


PASSES = passes()
MASKED_PASSES = passes(masks=tuple(jnp.asarray(RANDOM.random_sample((2, N, 1, H, W)) < 0.6)))

# --- Layers, as functions of weight, bias, the slope of an activation, and x.

ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "gelu": lambda slope: jax.nn.gelu,
    # Activations that close over a differentiated array.
    "tanh": lambda slope: jax.jit(lambda u: jnp.tanh(slope * u)),
    "branch": lambda slope: lambda u: jax.lax.cond(u.sum() > 0, jnp.sin, jnp.tanh, slope * u),
}


def formula(activation, axes, biased=True):
    """Returns the formula of a layer that normalises over these axes."""

    def f(weight, bias, slope, x):
        u = x - x.mean(axes, keepdims=True)
        u = u / jnp.sqrt((u**2).mean(axes, keepdims=True) + EPS)
        vector = weight.shape if weight.ndim > 1 else (C, 1, 1)
        u = u * weight.reshape(vector) + biased * bias.reshape(vector)
        return jax.vmap(ACTIVATIONS[activation](slope))(u)

    return f


def batch_norm_of_one(weight, bias, slope, x):
    """Returns the output of one example."""
    layer, state = make(C, "batch", approach="batch", activation=jax.nn.gelu)
    layer = eqx.tree_at(lambda m: (m.weight, m.bias), layer, (weight, bias))
    return layer(x, state)[0]


def batch_norm():
    f = jax.vmap(batch_norm_of_one, axis_name="batch", in_axes=(None, None, None, 0))
    return case(f, formula("gelu", SUMMED), (C,), (C,), (), FULL)


def layer_norm(activation, **options):
    def f(weight, bias, slope, x):
        layer = LayerNorm(FULL[1:], activation=ACTIVATIONS[activation](slope), **options)
        layer = eqx.tree_at(lambda m: m.weight, layer, weight)
        if layer.use_bias:
            layer = eqx.tree_at(lambda m: m.bias, layer, bias)
        return jax.vmap(layer)(x)

    over = formula(activation, (1, 2, 3), options.get("use_bias", True))
    return case(f, over, FULL[1:], FULL[1:], (), FULL)


LAYERS = {
    "BatchNorm": batch_norm(),
    "LayerNorm": layer_norm("tanh"),
    "LayerNorm, branch, no bias": layer_norm("branch", use_bias=False),
}
