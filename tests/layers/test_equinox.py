"""Tests that the layer replaces Equinox's: results, arguments, class, and leaves."""

import dataclasses
import functools
import inspect
from typing import Literal

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import orbax.checkpoint
import pytest

from eqx_norm import BatchNorm, LayerNorm
from tests.helpers import make, normal, over_batch
from tests.helpers import quick_call as call
from tests.helpers import quick_call_and_grad as call_and_grad
from tests.layers.norms import with_parameters

UNOPTIMISED = True  # compares values: tests/compiling.py

pytestmark = pytest.mark.x32  # Equinox's layer promotes
close = functools.partial(chex.assert_trees_all_close, rtol=1e-5, atol=1e-5)


def pair(mode: Literal["batch", "ema"] = "batch", channels=5, **kwargs):
    """Returns this layer and Equinox's, each with its state."""
    theirs = eqx.nn.make_with_state(eqx.nn.BatchNorm)(channels, "batch", mode=mode, **kwargs)
    return make(channels, "batch", approach=mode, **kwargs), theirs


@pytest.mark.parametrize(
    ("mode", "shape", "affine"), [("ema", (8, 5), False), ("batch", (4, 5, 3, 2), True)]
)
def test_training_equals_equinox(mode, shape, affine):
    def outputs(layer, state):
        if affine:
            layer = with_parameters(layer, normal(1, (5,), 1, 0.5), normal(2, (5,)))
        for step in range(3):
            x, dy = normal(10 + step, shape, step, 2), normal(20 + step, shape)
            y, state, gradients = call_and_grad(layer, state, x, dy)
            yield y, jax.tree.leaves(gradients)
            if mode == "ema":
                yield call(eqx.nn.inference_mode(layer), state, x)[0]

    layers = pair(mode, momentum=0.7, channelwise_affine=affine)
    close(*(list(outputs(*each)) for each in layers))


def test_complex_training_equals_equinox():
    def outputs(layer, state):
        for step in range(2):
            x = jax.lax.complex(normal(step, (8, 5, 4), 1), normal(9 + step, (8, 5, 4), 2, 3))
            y, state = call(layer, state, x)
            yield y
            if isinstance(layer, BatchNorm):
                memory = state.get(layer.memory_index).statistics
                assert y.dtype == memory.mean.dtype == jnp.complex64
                assert memory.variance.dtype == jnp.float32

    close(*(list(outputs(*each)) for each in pair("ema", dtype=jnp.complex64)))


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


def test_layer_is_an_argument_of_plain_jit():
    """Fails for a layer that has its axis name as a leaf:
    https://github.com/patrick-kidger/equinox/issues/1074."""
    x = normal(0, (64, 3), 2, 1)
    run = jax.jit(lambda layer, state, x: over_batch(layer)(x, state)[0])
    assert run(*make(3, "batch", approach="batch"), x).shape == x.shape


def test_activation_function_is_a_leaf_that_orbax_restores(tmp_path):
    """Fails for a `Partial` of the function: Orbax takes nodes without leaves for leaves,
    https://github.com/patrick-kidger/equinox/issues/606."""
    silu, elu = jax.nn.silu, functools.partial(jax.nn.elu, alpha=0.5)
    norm, state = make(3, "batch", approach="batch", activation=silu)
    model = norm, LayerNorm(3, activation=silu), LayerNorm(3, activation=elu)
    assert [leaf for leaf in jax.tree.leaves(model) if callable(leaf)] == [silu, silu, elu]
    arrays = eqx.filter((model, state), eqx.is_array)
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "model", arrays)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "model", arrays)
    assert eqx.tree_equal(restored, arrays)
