"""A masked place is as if it were not there: in outputs, statistics, memory and gradients."""

import functools

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from .compiling import filter_jit
from .helpers import bits, copy, f32, make, normal
from .helpers import quick_call as call
from .masking import (
    DY,
    EXAMPLES,
    LENGTHS,
    MASKS,
    NOT_THE_FIRST,
    C,
    L,
    N,
    X,
    activation,
    assert_as_unpadded,
    call_masked,
    close,
    differentiated,
    each_approach,
    forward,
    spoil,
    step,
    trained,
    unpadded,
    untrained,
)


@each_approach
def test_a_padded_batch_equals_the_batch_without_padding(approach):
    for make_layer in (trained, untrained):
        for mask in MASKS:
            assert_as_unpadded(*make_layer(approach), X, mask)


def test_without_an_activation_and_one_bool_per_example():
    for mask in (EXAMPLES, LENGTHS):
        assert_as_unpadded(*trained("batch", None), X, mask)


def test_a_mean_far_from_zero():
    """The place from which deviations are counted has to be one that counts."""
    for mask in MASKS:
        # At 2^14 x is rounded to 2^-10, alike on both sides; nothing else is lost.
        assert_as_unpadded(*untrained("batch"), X + 2.0**14, mask)


def test_a_constant_channel_gives_exactly_the_bias():
    layer, state = untrained("batch", None)
    for mask in MASKS:
        x = spoil(jnp.full_like(X, 0.1), mask)
        y = eqx.filter_jit(differentiated)(layer, copy(state), x, mask, DY)[0]
        kept = unpadded(y, mask)
        assert bits(kept) == bits(jnp.broadcast_to(layer.bias, kept.shape))


def test_bfloat16():
    """The statistics are float32; outputs are rounded once, which may fall either way."""
    ulp = float(jnp.finfo(jnp.bfloat16).eps)

    def close_in_bfloat16(a, b, **_):
        np.testing.assert_allclose(f32(a), f32(b), rtol=ulp, atol=ulp)

    for mask in MASKS:
        x = X.astype(jnp.bfloat16)
        assert_as_unpadded(*trained("batch", jax.nn.relu), x, mask, close_in_bfloat16)


def test_complex():
    layer, state = make(C, "batch", approach="batch", dtype=jnp.complex64)
    imag = normal(3, X.shape, 2)
    x, dy = jax.lax.complex(X, imag), jax.lax.complex(DY, imag)
    for mask in MASKS:
        spoilt = jax.lax.complex(spoil(X, mask), spoil(imag, mask))
        y, memory, *vectors, dx = step(layer, copy(state), spoilt, mask, dy)
        right = step(layer, copy(state), unpadded(x, mask), None, unpadded(dy, mask))
        chex.assert_trees_all_close(memory, right[1], rtol=1e-6, atol=1e-6)
        for ours, theirs in ((y, right[0]), (dx, right[4])):
            close(unpadded(ours, mask), theirs)
            np.testing.assert_array_equal(unpadded(ours, ~mask), 0)
        for ours, theirs in zip(vectors, right[2:4], strict=True):
            close(ours, theirs, atol=1e-5)


def test_gradients_of_masked_outputs_are_not_looked_at():
    for function in (None, activation, jnp.log):
        layer, state = trained("batch", function)
        layer = eqx.tree_at(lambda m: m.bias, layer, f32([10, 10, 10]))
        right = step(layer, copy(state), X, LENGTHS, DY)
        spoilt = step(layer, copy(state), X, LENGTHS, spoil(DY, LENGTHS))
        chex.assert_trees_all_equal(right, spoilt)
        chex.assert_tree_all_finite(right)


def test_second_derivatives_do_not_see_masked_places():
    layer, state = trained("batch", jax.nn.silu)

    @filter_jit
    def penalty_gradient(x, mask):
        def loss(x):
            return jnp.sum(jnp.sin(forward(layer, x, mask, copy(state))[0]))

        return jax.grad(lambda x: jnp.sum(jax.grad(loss)(x) ** 2))(x)

    for mask in (LENGTHS, NOT_THE_FIRST):
        dx = penalty_gradient(spoil(X, mask), mask)
        right = penalty_gradient(unpadded(X, mask), None)
        close(unpadded(dx, mask), right, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(unpadded(dx, ~mask), 0)


@pytest.mark.parametrize("shape", [(), (L,), (4, 1), (4, L)], ids=str)
def test_a_mask_broadcasts_to_the_spatial_axes(shape):
    layer, state = trained("batch")
    x = normal(4, (N, C, 4, L))
    mask = np.random.RandomState(0).random((N, *shape)) < 0.6
    full = np.broadcast_to(mask.reshape(N, *[1] * (2 - len(shape)), *shape), (N, 4, L))
    y, new = call_masked(layer, copy(state), x, mask)
    right, right_state = call(layer, state, jnp.moveaxis(x, 1, -1)[full])
    np.testing.assert_allclose(np.moveaxis(y, 1, -1)[full], right, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(np.moveaxis(y, 1, -1)[~full], 0)
    chex.assert_trees_all_close(new, right_state, rtol=1e-6, atol=1e-6)


def test_one_mask_for_all_examples_in_whatever_it_is_written():
    layer, state = trained("batch")
    right = call_masked(layer, copy(state), X, np.tile(LENGTHS[3], (N, 1)))
    ours = call(functools.partial(layer, mask=LENGTHS[3]), copy(state), X)
    chex.assert_trees_all_close(ours, right, rtol=1e-6, atol=1e-6)
    ours = call(functools.partial(layer, mask=True), copy(state), X)
    chex.assert_trees_all_close(ours, call(layer, state, X), rtol=1e-6, atol=1e-6)


@each_approach
def test_a_mask_of_all_true_is_no_mask(approach):
    layer, state = trained(approach)
    without = step(layer, copy(state), X, None, DY)
    ours = step(layer, copy(state), X, np.ones((N, L), bool), DY)
    chex.assert_trees_all_close(ours, without, rtol=1e-6, atol=2e-6)
