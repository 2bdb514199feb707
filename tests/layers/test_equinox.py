"""Compares with Equinox's layer: equal results where Equinox is right, and Equinox's faults.

A test of a fault fails once Equinox has fixed the fault; then remove it from the README's list.
"""

import dataclasses
import functools
import inspect
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint
import pytest

from eqx_norm import BatchNorm, LayerNorm
from tests.helpers import call as precise_call
from tests.helpers import make, normal, over_batch
from tests.helpers import quick_call as call
from tests.helpers import quick_call_and_grad as call_and_grad
from tests.layers.norms import with_parameters

pytestmark = pytest.mark.x32  # Equinox's layer promotes
SHAPES = [(8, 5), (4, 5, 3, 2), (3, 5, 2, 2, 3, 2)]
close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)


def pair(mode: Literal["batch", "ema"] = "batch", channels=5, **kwargs):
    """Returns this layer and Equinox's, each with its state."""
    theirs = eqx.nn.make_with_state(eqx.nn.BatchNorm)(channels, "batch", mode=mode, **kwargs)
    return make(channels, "batch", approach=mode, **kwargs), theirs


@pytest.mark.parametrize(
    ("shape", "affine"), [*((shape, True) for shape in SHAPES), (SHAPES[0], False)], ids=str
)
@pytest.mark.parametrize("mode", ["ema", "batch"])
def test_training_equals_equinox(mode, shape, affine):
    (ours, our_state), (theirs, their_state) = pair(
        mode, momentum=0.7, channelwise_affine=affine
    )
    if affine:
        vectors = normal(1, (5,), 1, 0.5), normal(2, (5,))
        ours, theirs = (with_parameters(layer, *vectors) for layer in (ours, theirs))
    for step in range(3):
        x, dy = normal(10 + step, shape, step, 2), normal(20 + step, shape)
        y, our_state, gradients = call_and_grad(ours, our_state, x, dy)
        their_y, their_state, their_gradients = call_and_grad(theirs, their_state, x, dy)
        close(y, their_y)
        leaves, their_leaves = map(jax.tree.leaves, (gradients, their_gradients))
        assert len(leaves) == (3 if affine else 1)
        jax.tree.map(close, leaves, their_leaves)
        if mode == "ema":
            inference = eqx.nn.inference_mode((ours, theirs))
            close(call(inference[0], our_state, x)[0], call(inference[1], their_state, x)[0])


def test_complex_training_equals_equinox():
    (ours, our_state), (theirs, their_state) = pair("ema", dtype=jnp.complex64)
    for step in range(2):
        x = jax.lax.complex(normal(step, (8, 5, 4), 1), normal(9 + step, (8, 5, 4), 2, 3))
        y, our_state = call(ours, our_state, x)
        their_y, their_state = call(theirs, their_state, x)
        close(y, their_y)
        assert y.dtype == jnp.complex64
    memory = our_state.get(ours.memory_index).statistics
    assert (memory.mean.dtype, memory.variance.dtype) == (jnp.complex64, jnp.float32)


def test_first_eight_arguments_equal_equinox():
    ours, theirs = (
        [(p.name, p.default) for p in inspect.signature(layer.__init__).parameters.values()]
        for layer in (BatchNorm, eqx.nn.BatchNorm)
    )
    momentum = 5  # a strategy has its own momentum, so ours is None
    assert (ours[momentum], theirs[momentum]) == (("momentum", None), ("momentum", 0.99))
    del ours[momentum], theirs[momentum]
    assert ours[:7] == theirs[:7]
    added = "approach mode activation weight_offset unbiased memory_axis_name implementation"
    assert [name for name, _ in ours[7:]] == added.split()


def test_batch_norm_subclasses_equinox_s_without_its_memory():
    layer, state = make(3, "batch", approach="batch")
    assert isinstance(layer, eqx.nn.BatchNorm)  # models check this
    dropped = {field.name for field in dataclasses.fields(eqx.nn.BatchNorm)} - set(vars(layer))
    indices = {"ema_first_time_index", "ema_state_index", "batch_counter", "batch_state_index"}
    assert dropped == {"mode", "momentum", *indices}
    assert not any(hasattr(layer, name) for name in dropped - {"momentum"})
    # The averages, their number of batches, and the counts of accepted and rejected batches.
    assert len(jax.tree.leaves(state)) == 3


# --- The faults of Equinox's layer, which the README lists and the swap corrects.

X = normal(0, (64, 3), 2, 1)


def both(x, *others, inference=False, **kwargs):
    """Returns (output, state) of this layer, and of Equinox's, after training steps."""
    results = []
    for layer, state in pair(channels=3, **kwargs):
        y, state = precise_call(layer, state, x)
        for other in others:
            y, state = precise_call(layer, state, other)
        if inference:
            y, state = precise_call(eqx.nn.inference_mode(layer), state, X)
        results.append((y, state))
    return results


def test_equinox_fault_inference_variance_after_one_step():
    (ours, _), (theirs, _) = both(X, inference=True)
    np.testing.assert_allclose(theirs.std(), 0.1, rtol=0.1)  # variance 100 instead of 1
    np.testing.assert_allclose(ours.std(), 1, rtol=0.1)


def test_equinox_fault_constant_channel():
    (ours, _), (theirs, _) = both(jnp.full_like(X[:7], 0.1))
    assert abs(theirs).max() > 1e-7
    assert abs(ours).max() == 0


def test_equinox_fault_nan_in_one_batch():
    (ours, _), (theirs, _) = both(X, X.at[0, 0].set(jnp.nan), X, inference=True)
    assert np.isfinite(ours).all()
    assert not np.isfinite(theirs).all()


@pytest.mark.parametrize("half", [jnp.bfloat16, jnp.float16])
def test_equinox_fault_half_precision(half):
    x = X.astype(half)
    ours, theirs = pair("ema", channels=3)
    with pytest.raises(TypeError, match="select"):  # between float32 and half precision
        precise_call(*theirs, x)
    assert precise_call(*ours, x)[0].dtype == half
    assert [y.dtype for y, _ in both(x)] == [half, jnp.float32]
    memories = [
        {leaf.dtype for leaf in jax.tree.leaves(state) if eqx.is_inexact_array(leaf)}
        for _, state in both(x, dtype=half)
    ]
    assert memories == [{jnp.dtype(jnp.float32)}, {jnp.dtype(half)}]


def test_equinox_fault_plain_jit():
    """Tests issue 1074: Equinox's layer has its axis name as a leaf."""
    ours, theirs = pair(channels=3)
    run = jax.jit(lambda layer, state, x: over_batch(layer)(x, state)[0])
    with pytest.raises(TypeError, match="non-array argument|not a valid JAX type"):
        run(*theirs, X)
    assert run(*ours, X).shape == X.shape


@pytest.mark.parametrize("activation", [jax.nn.silu, functools.partial(jax.nn.elu, alpha=0.5)])
def test_activation_function_is_a_leaf_that_orbax_restores(activation, tmp_path):
    """Fails for a `Partial` of the function: Orbax takes nodes without leaves for leaves,
    https://github.com/patrick-kidger/equinox/issues/606."""
    norm, state = make(3, "batch", approach="batch", activation=activation)
    model = norm, LayerNorm(3, activation=activation)
    assert [leaf for leaf in jax.tree.leaves(model) if callable(leaf)] == [activation] * 2
    arrays = eqx.filter((model, state), eqx.is_array)
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "model", arrays)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "model", arrays)
    assert eqx.tree_equal(restored, arrays)
