"""Takes the training step of a batch norm: moments, the approach, what is remembered, and y."""

import functools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from eqx_norm import _contract, _memory, _normalise
from eqx_norm._normalise import AxisName, BatchImplementation
from eqx_norm.strategies import TrainingBatch


class Options(NamedTuple):
    """Holds the layer's arguments that are known while tracing."""

    axis_name: AxisName
    eps: float
    unbiased: bool
    implementation: BatchImplementation


class Remembered(NamedTuple):
    """Holds a layer's state: the strategy's memory, and how many batches it has taken in."""

    memory: Any
    accepted: Array
    rejected: Array


def step(
    x: Array,
    mask: Array | None,
    inference: Bool[Array, ""] | None,
    before: Remembered,
    layer: Any,
    options: Options,
) -> tuple[Array, Remembered]:
    """Returns y, and what is remembered after the batch.

    Layers that are alike, of which a network has many, are traced once, differentiated once,
    and are one function in the program that XLA is given. Not with "plain": what knows no
    primitives may not know calls.

    **Arguments:**

    - `x`: one example, `(channels, *spatial)`; y has its shape and dtype.
    - `mask`: one bool for each position, of a shape that broadcasts to `spatial`, or `None`.
    - `inference`: whether to normalise by what is remembered, if only the program knows.
    - `layer`: approach, activation, weight and bias.

    **Raises:** `NameError`, `ValueError` and `TypeError`, as `BatchNorm` says.
    """
    arrays, others = eqx.partition(layer, eqx.is_array)
    leaves, structure = jax.tree.flatten(others)
    static = structure, tuple(leaves), options
    compiled = options.implementation != "plain" and _is_hashable(static)
    return (_compiled_step if compiled else _step)(x, mask, inference, before, arrays, static)


def _step(
    x: Array,
    mask: Array | None,
    inference: Array | None,
    before: Remembered,
    arrays: Any,
    static: Any,
) -> tuple[Array, Remembered]:
    structure, leaves, options = static
    layer = eqx.combine(arrays, jax.tree.unflatten(structure, leaves))
    approach, activation, weight, bias = layer
    values = _normalise.Values(x, options.axis_name, mask, options.implementation)
    before = jax.lax.stop_gradient(before)
    batch = _training_batch(values, before.accepted, options)
    update = functools.partial(_contract.update, approach)
    used, learnt = values.arithmetic.rounded(update)(batch, before.memory)
    if inference is not None:
        known = _contract.infer(approach, before.memory, batch.mean.shape[0])
        used = _select(inference, known, used)
    finite = values.arithmetic.finite(batch)
    accepts, rejects = finite, ~finite
    if inference is not None:
        accepts, rejects = ~inference & accepts, ~inference & rejects
    if mask is not None:
        accepts = accepts & (batch.count > batch.ddof)
    _memory.check_shared(before.memory, learnt, options.axis_name)
    after = Remembered(
        _select(accepts, jax.lax.stop_gradient(learnt), before.memory),
        _memory.counted(before.accepted, accepts),
        _memory.counted(before.rejected, rejects),
    )
    y = values.normalise(used, weight, bias, eps=options.eps, activation=activation)
    return y, values.arithmetic.remembered(after)


_compiled_step = jax.jit(_step, static_argnames="static")


def _training_batch(values: _normalise.Values, step: Array, options: Options) -> TrainingBatch:
    x, count = values.x, values.count()
    if count <= int(options.unbiased):
        raise ValueError(
            f"x has shape {x.shape} and the mapped axes {options.axis_name!r} hold "
            f"{count // max(1, x[0].size)} examples: {count} values per channel"
            + (
                ", for which the unbiased variance does not exist (n/(n-1) with n = 1). "
                "Give a larger batch, or make the layer with unbiased=False."
                if count
                else ", of which there are no statistics."
            )
        )
    batch = values.moments()
    batch = batch.astype(_memory.statistics_dtype(batch.mean.dtype))
    return TrainingBatch(
        batch.count,
        batch.mean,
        batch.m2,
        batch.mean_rest,
        int(options.unbiased),
        eps=options.eps,
        step=step,
    )


def _is_hashable(static: Any) -> bool:
    """Returns whether layers can be told apart by it; a user's strategy may hold anything."""
    try:
        hash(static)
    except TypeError:
        return False
    return True


@jax.jit
def _select(condition: Any, if_true: Any, if_false: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), if_true, if_false)
