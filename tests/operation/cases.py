"""Holds the table of passes over x and of layers, each with its formula."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from eqx_norm import GroupNorm, InstanceNorm, LayerNorm, RMSNorm
from eqx_norm._normalise import elementwise
from eqx_norm._normalise.passes import Static, bind
from eqx_norm._normalise.primitives import AFFINE, MOMENTS, STATISTICS, SUMS
from eqx_norm.strategies import Adam, Batch, Ema, Renorm, Running, SmoothStart, VarianceClip
from tests.helpers import APPROACHES, make

N, C, H, W = 8, 4, 2, 3
EPS = 1e-5
FULL, COLUMN = (N, C, H, W), (1, C, 1, 1)
RANDOM = np.random.RandomState(0)


class Case(NamedTuple):
    """Holds a function of float64 operands, x last, its formula, and a direction to move in."""

    f: Callable[..., Any]
    formula: Callable[..., Any]
    operands: tuple[np.ndarray, ...]
    tangents: tuple[np.ndarray, ...]
    masks: tuple[np.ndarray, ...] = ()  # of two members of an ensemble; one more operand

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


# --- Passes over x. They take and return vectors as columns, with one number per channel.

STATIC = Static(3, C)
SUMMED = (0, 2, 3)


def moments(x, mask=None):
    options: Any = {"static": STATIC, "shape": COLUMN, "names": ()}
    count, mean, m2, rest = bind(STATISTICS, jax.lax.stop_gradient(x), mask, **options)
    options |= {"mesh": (), "centred": True}
    mean, m2 = bind(MOMENTS, x, x, mean, rest, m2, count, mask, **options)
    return mean + rest, m2


def sums(g, mean, rest, x, mask=None, *, both=True):
    return bind(SUMS, g, x, mean, rest, mask, static=STATIC, shape=COLUMN, both=both)


def affine(bias, scale, mean, rest, x, mask=None):
    return bind(AFFINE, bias, scale, x, x, mean, rest, mask, static=STATIC)[0]


def silu_and_cos(u):
    """Returns what is neither 0 nor flat at 0, which a masked place must not show."""
    return jax.nn.silu(u) + jnp.cos(u)


def activated(bias, scale, mean, rest, x, mask=None):
    return elementwise.activated(silu_and_cos, STATIC, [bias, scale, mean, rest], x, x, mask)


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

MOMENTUM, BATCHES = 0.7, 2
MEAN, VARIANCE = np.array([0.5, 1.0, 1.2, 2]), np.array([2.0, 0.7, 5, 0.2])
STRATEGIES = {
    "batch": Batch(MOMENTUM),
    "ema": Ema(MOMENTUM),
    "adam": Adam(MOMENTUM),
    "smooth_start": SmoothStart(MOMENTUM),
    # Of the four channels some are clipped, and some not.
    "renorm": Renorm(MOMENTUM, r_max=1.5, d_max=0.3),
    "variance_clip": VarianceClip(Batch(MOMENTUM), ratio=1.5, start=1),
}
ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "none": lambda slope: None,
    "relu": lambda slope: jax.nn.relu,
    "silu": lambda slope: jax.nn.silu,
    "gelu": lambda slope: jax.nn.gelu,
    "prelu": eqx.nn.PReLU,
    # Close over what is differentiated.
    "tanh": lambda slope: lambda u: jnp.tanh(slope * u),
    "jitted tanh": lambda slope: jax.jit(lambda u: jnp.tanh(slope * u)),
    "branch": lambda slope: lambda u: jax.lax.cond(u.sum() > 0, jnp.sin, jnp.tanh, slope * u),
}
POSITIONS = np.array([[True, False, True], [True, True, False]])


def used(approach, batch):
    """Returns mean and variance that normalise a batch with this mean and variance, after
    BATCHES others."""
    if approach == "batch":
        return batch
    memory = np.reshape([MEAN, VARIANCE], (2, 1, C, 1, 1, 1))
    seen = 1 - MOMENTUM ** (BATCHES + 1)
    running = memory + (1 - MOMENTUM) / seen * (batch - memory)
    if approach == "renorm":
        sigma_b, sigma = (jnp.sqrt(v[1] + EPS) for v in (batch, memory))
        r, d = jnp.clip(sigma_b / sigma, 1 / 1.5, 1.5), (batch[0] - memory[0]) / sigma
        r, d = jax.lax.stop_gradient((r, jnp.clip(d, -0.3, 0.3)))
        return batch[0] - d * sigma_b / r, (sigma_b / r) ** 2 - EPS
    if approach == "variance_clip":
        most = 1.5 * (memory[1] + VARIANCE.mean())
        return batch[0], jnp.clip(batch[1], memory[1] / 1.5, most)
    return {
        "ema": MOMENTUM * memory + (1 - MOMENTUM) * batch,
        "adam": running,
        "smooth_start": seen * running + (1 - seen) * batch,
        "inference": memory,
    }[approach]


def formula(
    activation, groups, axes, approach="batch", *, mask=True, centred=True, biased=True
):
    """Returns the formula of a layer that normalises each of `groups` over these axes of
    [N, groups, channels of a group, H, W]."""

    def f(weight, bias, slope, x):
        cut = x.reshape(len(x), groups, -1, H, W)
        options: Any = {"axis": axes, "keepdims": True, "where": mask}
        mean = centred * cut.mean(**options)
        variance = jnp.mean((cut - mean) ** 2, **options)
        mean, variance = used(approach, jnp.stack([mean, variance]))
        u = ((cut - mean) / jnp.sqrt(variance + EPS)).reshape(x.shape)
        vector = weight.shape if weight.ndim > 1 else (C, 1, 1)
        u = u * weight.reshape(vector) + biased * bias.reshape(vector)
        function = ACTIVATIONS[activation](slope)
        return jnp.where(mask, u if function is None else jax.vmap(function)(u), 0)

    return f


def batch_norm_of_one(approach, activation, mask=None):
    """Returns the function of one example. It has statistics of the batch, over the mesh, too,
    if there is one."""

    def f(weight, bias, slope, x):
        names = ("batch", *jax.sharding.get_abstract_mesh().manual_axes)
        is_inference = approach == "inference"
        layer, state = make(
            C,
            names,
            approach=STRATEGIES["batch" if is_inference else approach],
            activation=ACTIVATIONS[activation](slope),
            inference=is_inference,
        )
        memory = Running.loaded(jnp.asarray(MEAN), VARIANCE, BATCHES)
        values = *jax.tree.leaves(memory), jnp.array([BATCHES, 0], jnp.int32)
        zeros, structure = jax.tree.flatten(state)  # on the mesh
        state = jax.tree.unflatten(structure, map(jnp.add, zeros, values))
        layer = eqx.tree_at(lambda m: (m.weight, m.bias), layer, (weight, bias))
        return layer(x, state, mask=mask)[0]

    return f


def batch_norm(approach, activation, mask=None):
    one = batch_norm_of_one(approach, activation, mask)
    f = jax.vmap(one, axis_name="batch", in_axes=(None, None, None, 0))
    over = formula(activation, C, (0, 2, 3, 4), approach, mask=True if mask is None else mask)
    return case(f, over, (C,), (C,), (), FULL)


def of_example(kind, *arguments, activation="none", groups=1, centred=True, **options):
    def f(weight, bias, slope, x):
        layer = kind(*arguments, activation=ACTIVATIONS[activation](slope), **options)
        parameters = [v for v in (layer.weight, layer.bias) if v is not None]
        values = (weight, bias)[: len(parameters)]
        layer = eqx.tree_at(lambda m: (m.weight, m.bias)[: len(values)], layer, values)
        return jax.vmap(layer)(x)

    biased = options.get("use_bias", True)
    over = formula(activation, groups, (2, 3, 4), centred=centred, biased=biased)
    vector = FULL[1:] if kind in (LayerNorm, RMSNorm) else (C,)
    return case(f, over, vector, vector, (), FULL)


def of_parts(kind, centred):
    """Returns a norm of examples that are cut in two along a mapped axis."""
    part = (C // 2, H, W)

    def f(weight, bias, slope, x):
        layer = kind(part, axis_name="part", activation=eqx.nn.PReLU(slope))

        def one(weight, bias, x):
            values = (weight, bias)
            return jax.vmap(eqx.tree_at(lambda m: (m.weight, m.bias), layer, values))(x)

        weight, bias, parts = (v.reshape(*v.shape[:-3], 2, *part) for v in (weight, bias, x))
        y = jax.vmap(one, (0, 0, 1), 1, axis_name="part")(weight, bias, parts)
        return y.reshape(x.shape)

    over = formula("prelu", 1, (2, 3, 4), centred=centred)
    return case(f, over, FULL[1:], FULL[1:], (), FULL)


# Of each approach one; a new one fails here until it has a formula.
AFTER = {"batch": "gelu", "ema": "relu", "adam": "silu", "smooth_start": "gelu"}
AFTER |= {"renorm": "none", "variance_clip": "prelu"}
LAYERS = {
    **{f"{name}, {AFTER[name]}": batch_norm(name, AFTER[name]) for name in APPROACHES},
    "batch, none": batch_norm("batch", "none"),
    "batch, tanh, mask": batch_norm("batch", "tanh", POSITIONS),
    "inference, prelu": batch_norm("inference", "prelu"),
    "LayerNorm, jitted tanh": of_example(LayerNorm, FULL[1:], activation="jitted tanh"),
    "LayerNorm, branch": of_example(LayerNorm, FULL[1:], activation="branch"),
    "LayerNorm, no bias": of_example(LayerNorm, FULL[1:], use_bias=False),
    "RMSNorm, silu": of_example(RMSNorm, FULL[1:], activation="silu", centred=False),
    "LayerNorm, parts": of_parts(LayerNorm, True),
    "RMSNorm, parts": of_parts(RMSNorm, False),
    "GroupNorm, silu": of_example(GroupNorm, 2, C, activation="silu", groups=2),
    "InstanceNorm, prelu": of_example(
        InstanceNorm, C, 1e-5, True, activation="prelu", groups=C
    ),
}
