"""What is remembered of a batch with masks, and what inference does with them."""

import chex
import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest

from .helpers import bits, copy
from .helpers import quick_call as call
from .masking import (
    DY,
    LENGTHS,
    L,
    N,
    X,
    assert_as_unpadded,
    call_masked,
    close,
    each_approach,
    memory_of,
    same,
    spoil,
    step,
    trained,
    unpadded,
    untrained,
)


@each_approach
@pytest.mark.parametrize("x", [X, jnp.full_like(X, np.nan)], ids=["numbers", "nan"])
def test_a_batch_that_is_masked_out_leaves_the_memory_as_it_was(approach, x):
    for make_layer in (trained, untrained):
        layer, state = make_layer(approach)
        before = memory_of(layer, state)
        nothing = np.zeros((N, L), bool)
        y, after, dweight, dbias, dx = step(layer, copy(state), x, nothing, DY)
        assert same(after, before)
        for array in (y, dx):
            assert not np.asarray(array).view(np.uint8).any()
        assert np.isfinite(dweight).all()
        assert np.isfinite(dbias).all()


@each_approach
def test_the_first_batch_masked_out_is_as_if_it_had_not_been(approach):
    layer, state = untrained(approach)
    nothing = np.zeros((N, L), bool)
    _, after = call_masked(layer, copy(state), spoil(X, nothing), nothing)
    ours = step(layer, after, X, None, DY)
    right = step(layer, state, X, None, DY)
    assert same(ours, right)


@pytest.mark.parametrize("approach", ["batch", "ema"])
def test_unbiased_variance_of_one_value_is_not_remembered(approach):
    layer, state = trained(approach, unbiased=True)
    before = memory_of(layer, state)
    one, two = np.zeros((2, N, L), bool)
    one[2, 3] = two[2, 3] = two[4, 0] = True
    y, after, *gradients = step(layer, copy(state), spoil(X, one), one, DY)
    assert same(after, before)
    chex.assert_tree_all_finite((y, gradients))
    assert_as_unpadded(layer, state, X, two)
    _, (after, _), *_ = step(layer, copy(state), X, two, DY)
    assert bits(after.variance) != bits(before[0].variance)


@pytest.mark.parametrize("approach", ["batch", "ema"])
def test_inference_masks_outputs_only(approach):
    layer, state = trained(approach)
    inference = eqx.nn.inference_mode(layer)
    right, _ = call(inference, copy(state), X)
    y, after = call_masked(inference, copy(state), spoil(X, LENGTHS), LENGTHS)
    close(unpadded(y, LENGTHS), unpadded(right, LENGTHS))
    np.testing.assert_array_equal(unpadded(y, ~LENGTHS), 0)
    chex.assert_trees_all_equal(after, state)
    dx = step(inference, copy(state), spoil(X, LENGTHS), LENGTHS, DY)[-1]
    close(unpadded(dx, LENGTHS), unpadded(step(inference, state, X, None, DY)[-1], LENGTHS))
    np.testing.assert_array_equal(unpadded(dx, ~LENGTHS), 0)
