"""What several tests share: the strategies under test, and calling a layer on a batch."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from eqx_norm import BatchNorm
from eqx_norm.strategies import NAMED, Moments, Running, TrainingBatch

from .compiling import filter_jit

# Every test of a promise that all approaches make is parametrised with these.
APPROACHES = tuple(NAMED)


def make(*args: Any, **kwargs: Any) -> tuple[BatchNorm, eqx.nn.State]:
    return eqx.nn.make_with_state(BatchNorm)(*args, **kwargs)


def over_batch(model: Any, axis_name: str = "batch") -> Any:
    """`model(x, state)` over the first axis of x, as every user of Equinox writes it."""
    return jax.vmap(model, axis_name=axis_name, in_axes=(0, None), out_axes=(0, None))


def _call(model: Any, state: eqx.nn.State, x: Array) -> tuple[Array, eqx.nn.State]:
    return over_batch(model)(x, state)


def _call_and_grad(
    model: Any, state: eqx.nn.State, x: Array, dy: Array
) -> tuple[Array, eqx.nn.State, tuple[Any, Array]]:
    """Output, state, and the gradients of sum(output * dy) in (model, x)."""

    def loss(model_and_x: tuple[Any, Array]) -> tuple[Array, tuple[Array, eqx.nn.State]]:
        model, x = model_and_x
        y, new_state = over_batch(model)(x, state)
        return jnp.sum(y * dy), (y, new_state)

    gradients, (y, state) = eqx.filter_grad(loss, has_aux=True)((model, x))
    return y, state, gradients


call, call_and_grad = eqx.filter_jit(_call), eqx.filter_jit(_call_and_grad)
quick_call, quick_call_and_grad = filter_jit(_call), filter_jit(_call_and_grad)


def copy(state: eqx.nn.State) -> eqx.nn.State:
    """A state that stays usable when the other is used up."""
    leaves, structure = jax.tree.flatten(state)
    return jax.tree.unflatten(structure, leaves)


def load(layer: BatchNorm, state: eqx.nn.State, mean: Any, variance: Any) -> eqx.nn.State:
    return state.set(
        layer.memory_index,
        Running.loaded(np.asarray(mean, np.float32), np.asarray(variance, np.float32)),
    )


def at_step(step: Any, batch: Moments, eps: float = 1e-5) -> TrainingBatch:
    """The moments as a layer hands them to a strategy, after so many batches."""
    return TrainingBatch(
        batch.count,
        batch.mean,
        batch.m2,
        batch.mean_rest,
        batch.ddof,
        eps=eps,
        step=jnp.asarray(step, jnp.int32),
    )


def normal(seed: int, shape: tuple[int, ...], mean: float = 0.0, std: float = 1.0) -> Array:
    values = np.random.RandomState(seed).standard_normal(shape)
    return jnp.asarray(mean + std * values, jnp.float32)


def f32(values: Any) -> Array:
    return jnp.asarray(values, jnp.float32)


def member(tree: Any, i: int) -> Any:
    """The i-th member of an ensemble."""
    return jax.tree.map(lambda leaf: leaf[i] if eqx.is_array(leaf) else leaf, tree)


def bits(x: Any) -> bytes:
    return np.asarray(x).tobytes()


def remembered(layer: BatchNorm, state: eqx.nn.State) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance that inference uses."""
    used = layer.approach.infer(state.get(layer.memory_index))
    return np.asarray(used.mean), np.asarray(used.variance)
