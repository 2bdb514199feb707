"""Holds helpers of several tests: the approaches under test, and functions to call a layer."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from eqx_norm import BatchNorm
from eqx_norm.strategies import NAMED, AbstractStrategy, Moments, Pair, Running, TrainingBatch
from tests.compiling import filter_jit

# Every test of a property of all approaches is parametrised with these names.
APPROACHES = tuple(NAMED)
each_approach = pytest.mark.parametrize("approach", APPROACHES)


def make(*args: Any, **kwargs: Any) -> tuple[BatchNorm, eqx.nn.State]:
    return eqx.nn.make_with_state(BatchNorm)(*args, **kwargs)


def over_batch(model: Any, axis_name: str = "batch") -> Any:
    """Returns `model(x, state)` mapped over the first axis of x, as users of Equinox do."""
    return jax.vmap(model, axis_name=axis_name, in_axes=(0, None), out_axes=(0, None))


def _call(model: Any, state: eqx.nn.State, x: Array) -> tuple[Array, eqx.nn.State]:
    return over_batch(model)(x, state)


def y_and_gradients(f: Any, dy: Any, *arrays: Any, has_aux: bool = False) -> tuple[Any, ...]:
    """Returns `f(*arrays)`, and the gradients of sum(y * dy) in each argument, which may be a
    layer. With `has_aux`, f returns y and a state, say, and the state comes before these."""
    y, pull_back, *aux = eqx.filter_vjp(f, *arrays, has_aux=has_aux)
    return y, *aux, *pull_back(jnp.asarray(dy, y.dtype))


def _call_and_grad(
    model: Any, state: eqx.nn.State, x: Array, dy: Array
) -> tuple[Array, eqx.nn.State, tuple[Any, Array]]:
    """Returns output, state, and the gradients of sum(output * dy) in (model, x)."""

    def forward(model: Any, x: Array) -> tuple[Array, eqx.nn.State]:
        return over_batch(model)(x, state)

    y, state, *gradients = y_and_gradients(forward, dy, model, x, has_aux=True)
    return y, state, (gradients[0], gradients[1])


call, call_and_grad = eqx.filter_jit(_call), eqx.filter_jit(_call_and_grad)
quick_call, quick_call_and_grad = filter_jit(_call), filter_jit(_call_and_grad)


def copy(state: eqx.nn.State) -> eqx.nn.State:
    """Returns a copy of a state, which stays valid when the original is used."""
    leaves, structure = jax.tree.flatten(state)
    return jax.tree.unflatten(structure, leaves)


def remember(layer: BatchNorm, state: eqx.nn.State, statistics: Any) -> eqx.nn.State:
    """Returns the state with `statistics` as the memory of the layer's strategy."""
    held = state.get(layer.memory_index)
    return state.set(layer.memory_index, held._replace(statistics=statistics))


def load(layer: BatchNorm, state: eqx.nn.State, mean: Any, variance: Any) -> eqx.nn.State:
    return remember(layer, state, Running.loaded(floats(mean), floats(variance)))


def exact(pair: Pair) -> np.ndarray:
    """Returns the numbers of a pair in float64."""
    double = np.complex128 if jnp.iscomplexobj(pair.parts) else np.float64
    return np.asarray(pair.parts, double).sum(-2)


def remembered(layer: BatchNorm, state: eqx.nn.State) -> tuple[np.ndarray, np.ndarray]:
    """Returns the mean and the variance that inference uses."""
    used = layer.running(state)
    return np.asarray(used.mean), np.asarray(used.variance)


def at_step(step: Any, batch: Moments, eps: float = 1e-5) -> TrainingBatch:
    """Returns the moments as a layer passes them to a strategy after `step` batches."""
    return TrainingBatch(**vars(batch), eps=eps, step=jnp.asarray(step, jnp.int32))


class Cumulative(AbstractStrategy[Any]):
    """Normalises by the batch, and infers by all values so far, as a user's strategy may."""

    def init(self, channels: Any, dtype: Any) -> Any:
        return Moments.zero(channels, dtype)

    def update(self, batch: Any, memory: Any) -> tuple[Moments, Any]:
        return batch, memory.merge(batch)

    def infer(self, memory):
        return memory


class Loading(Cumulative):
    """Adds `load` to the user's strategy."""

    def load(self, learnt):
        return learnt


def random_layer(kind: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns a layer of Equinox with random arrays, without a program that draws them."""
    layer = eqx.filter_eval_shape(kind, *args, key=jax.random.key(0), **kwargs)
    return jax.tree.map(lambda leaf: normal(0, leaf.shape), layer)


def array(values: Any, dtype: Any) -> Array:
    """Returns numbers as an array of JAX. NumPy converts them, because JAX would compile a
    conversion for each shape."""
    return jax.device_put(np.asarray(values, jnp.dtype(dtype)))


def normal(seed: int, shape: tuple[int, ...], mean: float = 0.0, std: float = 1.0) -> Array:
    return f32(mean + std * np.random.RandomState(seed).standard_normal(shape))


def f32(values: Any) -> Array:
    return array(values, jnp.float32)


def floats(values: Any) -> Array:
    """Returns an array with the dtype of statistics: float32, or float64 under x64."""
    return array(values, float)


def cast(tree: Any, dtype: Any) -> Any:
    """Returns a pytree, a model for example, with all its floats in another dtype."""
    return jax.tree.map(
        lambda leaf: array(leaf, dtype) if eqx.is_inexact_array(leaf) else leaf, tree
    )


def member(tree: Any, i: int) -> Any:
    """Returns the i-th member of an ensemble, whose arrays may be traced."""
    return jax.tree.map(lambda leaf: leaf[i] if eqx.is_array(leaf) else leaf, tree)


def bits(x: Any) -> bytes:
    return np.asarray(x).tobytes()


def same(a: Any, b: Any) -> bool:
    """Returns whether all arrays of two pytrees are bitwise equal."""
    return list(map(bits, jax.tree.leaves(a))) == list(map(bits, jax.tree.leaves(b)))
