"""Tests that a masked position is as if it were not there: in outputs, gradients and memory."""

import functools

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm import LayerNorm, RMSNorm
from tests.compiling import filter_jit, jit
from tests.helpers import APPROACHES, bits, copy, each_approach, f32, make, member, normal, same
from tests.helpers import quick_call as call
from tests.layers.masking import (
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
    all_close,
    assert_as_unpadded,
    call_masked,
    close,
    forward,
    masked,
    spoil,
    step,
    trained,
    unpadded,
    untrained,
)
from tests.layers.norms import each_norm, made, mask_shape, with_parameters


@each_approach
def test_a_padded_batch_equals_the_batch_without_padding(approach):
    for make_layer in (trained, untrained):
        for mask in MASKS:
            assert_as_unpadded(*make_layer(approach), X, mask)


@pytest.mark.parametrize("mask", [EXAMPLES, LENGTHS], ids=["an example", "a position"])
def test_half_precision_and_complex_numbers(mask):
    """The mask has one bool for each example, or for each position."""
    x, dy = (jax.lax.complex(real, normal(3, X.shape, 2)) for real in (X, DY))
    layer, state = make(C, "batch", approach="batch", dtype=jnp.complex64)
    assert_as_unpadded(layer, state, x, mask, dy)
    # The statistics are float32; outputs are rounded once, which may fall either way.
    ulp = float(jnp.finfo(jnp.bfloat16).eps)

    def close(a, b, **_):
        np.testing.assert_allclose(f32(a), f32(b), rtol=ulp, atol=ulp)

    layer, state = trained("batch", jax.nn.relu)
    assert_as_unpadded(layer, state, X.astype(jnp.bfloat16), mask, close=close)


@pytest.mark.x32  # has its own dtypes
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16, jnp.complex64])
@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
def test_a_mask_of_values_leaves_an_example_of_those_that_count(kind, dtype):
    weight, bias = normal(2, (2, C, L), 1)
    whole = with_parameters(kind((C, L)), weight, bias)
    is_complex = dtype == jnp.complex64
    x, dy = (jax.lax.complex(*v[:2]) if is_complex else v[0].astype(dtype) for v in (X, DY))
    of_values = np.arange(C * L).reshape(C, L) % 3 > 0
    ulp = 1e-6 if is_complex else max(1e-6, float(jnp.finfo(dtype).eps))
    for mask in (of_values, np.ones((), bool)):
        kept = np.broadcast_to(mask, (C, L))
        alone = with_parameters(kind(int(kept.sum())), weight[kept], bias[kept])
        spoilt = jnp.where(kept, x, jnp.nan).astype(dtype)
        y, pull_back = jax.vjp(functools.partial(whole, mask=mask), spoilt)
        expected, pull_alone = jax.vjp(alone, x[kept])
        for array, desired in ((y, expected), (pull_back(dy)[0], pull_alone(dy[kept])[0])):
            assert array.dtype == dtype
            np.testing.assert_array_equal(array[~kept], 0)
            wide = (a.astype(jnp.complex64) for a in (array[kept], desired))
            np.testing.assert_allclose(*wide, rtol=ulp, atol=2 * ulp)


@pytest.mark.nans
@each_norm
@pytest.mark.parametrize("function", [None, activation, jnp.log, jax.nn.softmax])
def test_gradients_of_masked_values_are_0_whatever_x_and_dy_hold(name, function):
    layer, call = made(name, (C, L), activation=function)
    of_values = np.broadcast_to(LENGTHS[:, None], X.shape)
    mask = of_values if mask_shape(name, X.shape) == X.shape else LENGTHS

    def forward(weight, bias, x):
        return call(with_parameters(layer, weight, bias), x, mask)[0]

    @jit
    def derive(x, dy):
        y, pull_back = jax.vjp(forward, layer.weight, layer.bias, x)
        return y, *pull_back(dy)

    # The gradients of masked outputs are not looked at.
    chex.assert_trees_all_equal(derive(X, spoil(DY, LENGTHS)), derive(X, DY))
    for value in (np.nan, np.inf):
        y, dweight, _, dx = derive(X.at[1, 0, 0].set(value), DY)  # which counts
        assert not np.isfinite(dweight).all()
        for array in (y, dx):
            np.testing.assert_array_equal(unpadded(array, ~LENGTHS), 0)


def test_second_derivatives_do_not_see_masked_positions():
    layer, state = trained("batch", jax.nn.silu)

    @filter_jit
    def penalty_gradient(x, mask):
        def loss(x):
            return jnp.sum(jnp.sin(forward(layer, copy(state), x, mask)[0]))

        return jax.grad(lambda x: jnp.sum(jax.grad(loss)(x) ** 2))(x)

    dx = penalty_gradient(spoil(X, LENGTHS), LENGTHS)
    expected = penalty_gradient(unpadded(X, LENGTHS), None)
    close(unpadded(dx, LENGTHS), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(unpadded(dx, ~LENGTHS), 0)


@pytest.mark.parametrize("shape", [(), (L,), (4, 1), (4, L)], ids=str)
def test_a_mask_broadcasts_to_the_spatial_axes(shape):
    layer, state = trained("batch")
    x = normal(4, (N, C, 4, L))
    mask = np.random.RandomState(0).random((N, *shape)) < 0.6
    full = np.broadcast_to(mask.reshape(N, *[1] * (2 - len(shape)), *shape), (N, 4, L))
    y, after = call_masked(layer, copy(state), x, mask)
    expected, expected_state = call(layer, state, jnp.moveaxis(x, 1, -1)[full])
    close(np.moveaxis(y, 1, -1)[full], expected)
    np.testing.assert_array_equal(np.moveaxis(y, 1, -1)[~full], 0)
    all_close(after, expected_state)


def test_one_mask_for_all_examples():
    layer, state = trained("batch")
    expected = call_masked(layer, copy(state), X, np.tile(LENGTHS[3], (N, 1)))
    all_close(call(functools.partial(layer, mask=LENGTHS[3]), copy(state), X), expected)


@each_approach
def test_a_batch_that_is_masked_out_is_as_if_it_had_not_been(approach):
    nothing, x = np.zeros((N, L), bool), jax.device_put(np.full_like(X, np.nan))
    for make_layer in (trained, untrained):
        layer, state = make_layer(approach)
        y, after, *gradients, dx = step(layer, copy(state), x, nothing, DY)
        assert same(after, state)
        assert bits(y) == bits(dx) == bits(np.zeros_like(X))
        chex.assert_tree_all_finite(gradients)
    # As the first batch, too: the next one counts in full.
    assert same(step(layer, after, X, None, DY), step(layer, state, X, None, DY))


@pytest.mark.parametrize("approach", ["batch", "ema"])
def test_unbiased_variance_of_one_value_is_not_remembered(approach):
    layer, state = trained(approach, unbiased=True)
    one, two = np.zeros((2, N, L), bool)
    one[2, 3] = two[2, 3] = two[4, 0] = True
    y, after, *gradients = step(layer, copy(state), spoil(X, one), one, DY)
    assert same(after, state)
    chex.assert_tree_all_finite((y, gradients))
    assert_as_unpadded(layer, state, X, two)


def test_inference_masks_outputs_only():
    layer, state = trained("batch")
    inference = eqx.nn.inference_mode(layer)
    y, after, *_, dx = step(inference, copy(state), spoil(X, LENGTHS), LENGTHS, DY)
    expected = step(inference, copy(state), X, None, DY)
    assert same(after, state)
    for array, unmasked in ((y, expected[0]), (dx, expected[-1])):
        close(unpadded(array, LENGTHS), unpadded(unmasked, LENGTHS))
        np.testing.assert_array_equal(unpadded(array, ~LENGTHS), 0)


# --- Transformations. They are slow, and none changes a dtype: so not repeated in 64 bits.


@pytest.mark.x32
@each_approach
def test_an_ensemble_is_each_member_alone(approach):
    masks = jnp.stack([LENGTHS, np.zeros_like(LENGTHS), NOT_THE_FIRST])

    @eqx.filter_vmap
    def members(key):
        layer, state = untrained(approach)
        weight = jax.random.normal(key, (C,), jnp.float32)
        return eqx.tree_at(lambda m: m.weight, layer, weight), state

    layers, states = members(jax.random.split(jax.random.key(0), 3))
    x = normal(4, (3, *X.shape), 1, 2)
    call_members = filter_jit(eqx.filter_vmap(forward))
    for step_masks in (None, masks):
        ys, after = call_members(layers, copy(states), x, step_masks)
        for i in range(3):
            mask = None if step_masks is None else step_masks[i]
            alone = call_masked(member(layers, i), copy(member(states, i)), x[i], mask)
            all_close(alone, (ys[i], member(after, i)))
        states = after


@pytest.mark.x32
@pytest.mark.parametrize(
    ("approach", "names"),
    [*((approach, ("inner", "outer")) for approach in APPROACHES), ("ema", ["outer", "inner"])],
)
@pytest.mark.parametrize("unequal", [False, True], ids=["whole", "masked"])
def test_several_axis_names_are_one_large_batch(approach, names, unequal):
    """Under a mask it is no mean of means: one column counts in full, one by a single value."""
    mask = np.full((2, 3, L), True)
    if unequal:
        mask[1] = False
        mask[1, 1, 2] = True
    x = normal(7, (2, 3, C, L), 3, 2)
    one, one_state = untrained(approach)
    several, state = untrained(approach, axis_name=names)
    run = jit(masked(several, "inner", "outer"))
    flat = mask.reshape(N, L)
    for scale in (1, 2):
        y, state = run(scale * x, mask if unequal else None, state)
        values = unpadded(scale * x.reshape(N, C, L), flat)
        expected, one_state = call(one, one_state, values)
    close(unpadded(y.reshape(N, C, L), flat), expected)
    all_close(state, one_state)


@pytest.mark.x32
@pytest.mark.parametrize(
    ("approach", "unbiased"), [*((approach, False) for approach in APPROACHES), ("batch", True)]
)
def test_one_program_serves_all_masks_and_both_modes(approach, unbiased):
    """Plain `jax.jit` takes the layer, and the mode, as arguments."""
    layer, state = trained(approach, None, unbiased=unbiased)
    inference_only = eqx.nn.inference_mode(layer)

    @jit
    @eqx.debug.assert_max_traces(max_traces=1)
    def run(layer, state, x, mask, inference):
        return masked(functools.partial(layer, inference=inference))(x, mask, state)

    for mask in (LENGTHS, NOT_THE_FIRST):
        y, after = run(layer, copy(state), X, mask, False)
        expected, expected_state = call(layer, copy(state), unpadded(X, mask))
        close(unpadded(y, mask), expected)
        all_close(after, expected_state)
        inferred, unchanged = run(layer, copy(state), X, mask, True)
        close(inferred, call_masked(inference_only, copy(state), X, mask)[0])
        chex.assert_trees_all_equal(unchanged, state)
