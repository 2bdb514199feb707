"""A masked place is as if it were not there: in outputs, statistics, memory and gradients."""

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm.strategies import Batch, Moments, VarianceClip

from .helpers import APPROACHES, bits, call, copy, f32, make, member, normal, over_batch

ROOT = Path(__file__).parents[1]
N, C, L = 6, 3, 5
X, DY = normal(0, (N, C, L), 1, 2), normal(1, (N, C, L))
GARBAGE = (np.nan, np.inf, -np.inf, 1e30)
# In each of them 15 places count, so that they share a compiled function.
EXAMPLES = np.array([False, True, True, False, True, False])
LENGTHS = np.arange(L) < np.array([0, 5, 2, 4, 1, 3])[:, None]
NOT_THE_FIRST = np.arange(N * L).reshape(N, L) % 2 > 0
MASKS = (np.tile(EXAMPLES[:, None], (1, L)), LENGTHS, NOT_THE_FIRST)

close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)
each_approach = pytest.mark.parametrize("approach", APPROACHES)


def activation(u):
    """Neither 0 nor flat at 0, which is what a masked place is before it."""
    return jax.nn.softplus(u + 0.5)


def untrained(approach, activation=activation, axis_name="batch", **kwargs):
    if approach == "variance_clip":
        approach = VarianceClip(Batch(0.7), ratio=1.5, start=1)  # so that it does clip
    else:
        kwargs["momentum"] = 0.7
    layer, state = make(C, axis_name, approach=approach, activation=activation, **kwargs)
    weight_and_bias = f32([0.5, 1, 2]), f32([0.3, -1, 0])
    return eqx.tree_at(lambda m: (m.weight, m.bias), layer, weight_and_bias), state


def trained(approach, activation=activation, **kwargs):
    """After one batch, so that the memory matters."""
    layer, state = untrained(approach, activation, **kwargs)
    batch = Moments.of(f32([1, 0, 2]), f32([1, 2, 3]))
    _, memory = layer.approach.update(batch, state.get(layer.memory_index))
    return layer, state.set(layer.memory_index, memory)


def masked(layer):
    """The layer over a batch and its masks."""

    def one(x, mask, state):
        return layer(x, state, mask=mask)

    return jax.vmap(one, axis_name="batch", in_axes=(0, 0, None), out_axes=(0, None))


def forward(layer, x, mask, state):
    return over_batch(layer)(x, state) if mask is None else masked(layer)(x, mask, state)


@eqx.filter_jit
def call_masked(layer, state, x, mask):
    return masked(layer)(x, mask, state)


@eqx.filter_jit
def step(layer, state, x, mask, dy):
    """Output, memory, and the gradients of sum(output * dy) in weight, bias and x."""

    def loss(vectors, x):
        model = eqx.tree_at(lambda m: (m.weight, m.bias), layer, vectors)
        y, new_state = forward(model, x, mask, state)
        return jnp.vdot(y, dy).real, (y, memory_of(layer, new_state))

    gradient = jax.grad(loss, argnums=(0, 1), has_aux=True)
    ((dweight, dbias), dx), (y, memory) = gradient((layer.weight, layer.bias), x)
    return y, memory, dweight, dbias, dx


def memory_of(layer, state):
    return state.get(layer.memory_index), state.get(layer.rejected_index)


def same(a, b):
    """To the bit."""
    return list(map(bits, jax.tree.leaves(a))) == list(map(bits, jax.tree.leaves(b)))


def spoil(x, mask):
    """`x` with something else that is no number to calculate with in each masked place."""
    where = np.broadcast_to(~places(mask)[:, None], x.shape)
    x = np.array(x)
    x[where] = np.resize(np.asarray(GARBAGE, x.dtype), where.sum())
    return jnp.asarray(x)


def places(mask):
    return np.broadcast_to(mask.reshape(N, -1), (N, L))


def unpadded(x, mask):
    """What counts and nothing else, as one batch without spatial axes."""
    return jnp.asarray(np.asarray(x).swapaxes(1, 2)[places(mask)])


def assert_as_unpadded(layer, state, x, mask, close: Any = close):
    y, memory, dweight, dbias, dx = step(layer, copy(state), spoil(x, mask), mask, DY)
    right = step(layer, copy(state), unpadded(x, mask), None, unpadded(DY, mask))
    close(unpadded(y, mask), right[0])
    chex.assert_trees_all_close(memory, right[1], rtol=1e-6, atol=1e-6)
    close(dweight, right[2], atol=1e-5)
    close(dbias, right[3], atol=1e-5)
    close(unpadded(dx, mask), right[4])
    for array in (y, dx):
        assert array.dtype == x.dtype
        assert not np.asarray(unpadded(array, ~mask)).view(np.uint8).any()


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
        y = step(layer, copy(state), spoil(jnp.full_like(X, 0.1), mask), mask, DY)[0]
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

    @eqx.filter_jit
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


def test_masks_are_traced():
    layer, state = trained("batch")
    traces = 0

    @jax.jit
    def run(state, x, mask, inference):
        nonlocal traces
        traces += 1
        return masked(functools.partial(layer, inference=inference))(x, mask, state)

    for mask in (LENGTHS, NOT_THE_FIRST):
        y, new = run(copy(state), X, mask, False)
        right, right_state = call(layer, copy(state), unpadded(X, mask))
        close(unpadded(y, mask), right)
        chex.assert_trees_all_close(new, right_state, rtol=1e-6)
        _, unchanged = run(copy(state), X, mask, True)
        chex.assert_trees_all_equal(unchanged, state)
    assert traces == 1


def test_scan_over_batches_of_different_lengths():
    layer, state = trained("smooth_start")
    xs = normal(5, (3, *X.shape), 2, 3)
    masks = np.stack([LENGTHS, np.zeros_like(LENGTHS), NOT_THE_FIRST])
    over_batch_and_masks = masked(layer)

    def one(state, x_and_mask):
        x, mask = x_and_mask
        y, state = over_batch_and_masks(x, mask, state)
        return state, y

    scanned, _ = jax.lax.scan(one, copy(state), (xs, masks))
    for i in (0, 2):
        _, state = call(layer, state, unpadded(xs[i], masks[i]))
    chex.assert_trees_all_close(scanned, state, rtol=1e-6)


@pytest.mark.parametrize("mask_axis", [0, None], ids=["own masks", "one mask"])
def test_ensemble(mask_axis):
    layer, state = trained("batch")
    xs = normal(6, (2, *X.shape))
    masks = np.stack([LENGTHS, NOT_THE_FIRST]) if mask_axis == 0 else LENGTHS
    members = jax.jit(jax.vmap(masked(layer), in_axes=(0, mask_axis, None)))
    ys, states = members(xs, masks, copy(state))
    for i in range(2):
        mask = masks[i] if mask_axis == 0 else masks
        y, new = call_masked(layer, copy(state), xs[i], mask)
        close(y, ys[i])
        chex.assert_trees_all_close(new, member(states, i), rtol=1e-6)


@pytest.mark.parametrize(
    ("approach", "names"),
    [*((approach, ("inner", "outer")) for approach in APPROACHES), ("ema", ("outer", "inner"))],
)
def test_unequal_counts_over_two_axes(approach, names):
    """Not a mean of means: one column of the batch counts in full, one by a single value."""
    mask = np.zeros((2, 3, L), bool)
    mask[0], mask[1, 1, 2] = True, True
    x = normal(7, (2, 3, C, L), 3, 2)
    layer, state = untrained(approach)
    two, state_of_two = untrained(approach, axis_name=names)

    def inner(x, mask, state):
        return two(x, state, mask=mask)

    axes = {"in_axes": (0, 0, None), "out_axes": (0, None)}
    both = jax.vmap(jax.vmap(inner, axis_name="inner", **axes), axis_name="outer", **axes)
    both = jax.jit(both)
    _, state_of_two = both(x, mask, state_of_two)
    y, state_of_two = both(2 * x, mask, state_of_two)
    flat = mask.reshape(N, L)
    for right_x in (x, 2 * x):
        right, state = call(layer, state, unpadded(right_x.reshape(N, C, L), flat))
    close(unpadded(y.reshape(N, C, L), flat), right)
    chex.assert_trees_all_close(
        jax.tree.leaves(state_of_two), jax.tree.leaves(state), rtol=1e-6, atol=1e-6
    )


# In a process of its own, because the number of CPU devices is fixed when JAX starts.
SHARDED = """
import jax, equinox as eqx, numpy as np
from jax.sharding import Mesh, PartitionSpec as P
from eqx_norm import BatchNorm

def over_batch(layer):
    def one(x, mask, state):
        return layer(x, state, mask=mask)
    return jax.vmap(one, axis_name="batch", in_axes=(0, 0, None), out_axes=(0, None))

def value_and_gradient(f, x, mask, state):
    def loss(x):
        y, new_state = f(x, mask, state)
        return (y ** 3).sum(), (y, new_state)
    return jax.grad(loss, has_aux=True)(x)

mesh = Mesh(np.array(jax.devices()), ("devices",))
assert len(jax.devices()) == 2
make = eqx.nn.make_with_state(BatchNorm)
x = 5 + 2 * jax.random.normal(jax.random.key(0), (8, 3, 5))
specs = dict(in_specs=(P("devices"), P("devices"), P()), out_specs=(P("devices"), P()))

def check(names, approach):
    one, state = make(3, "batch", approach=approach)
    layer, _ = make(3, names, approach=approach)
    sharded = jax.shard_map(over_batch(layer), mesh=mesh, check_vma=False, **specs)
    ours = jax.jit(lambda *arrays: value_and_gradient(sharded, *arrays))
    right = jax.jit(lambda *arrays: value_and_gradient(over_batch(one), *arrays))
    for left in (1, 0):
        mask = np.ones((8, 5), bool)
        mask[:4] = False
        mask[0, :left] = True
        results = ours(np.where(mask[:, None], x, np.nan), mask, state), right(x, mask, state)
        for a, b in zip(*map(jax.tree.leaves, results), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-5)
    dx, (y, after) = ours(np.full_like(x, np.nan), np.zeros_like(mask), state)
    assert not np.asarray(y).any() and not np.asarray(dx).any()
    for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(state), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()

check(("batch", "devices"), "batch")
check(("devices", "batch"), "smooth_start")
"""


def test_unequal_counts_over_devices():
    flags = "--xla_force_host_platform_device_count=2"
    result = subprocess.run(
        [sys.executable, "-c", SHARDED],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((N, L + 1), r"mask has shape \(6,\).*\(3, 5\).*shape \(\),.*shape \(5,\)"),
        ((N, 1, L), r"mask has shape \(1, 5\).*\(3, 5\).*shape \(\),.*shape \(5,\)"),
        ((N, C, L), r"mask has shape \(3, 5\).*\(3, 5\).*the channels share it"),
    ],
    ids=["length", "axes", "channels"],
)
@pytest.mark.parametrize("inference", [False, True], ids=["training", "inference"])
def test_a_wrong_shape(shape, message, inference):
    layer, state = untrained("batch", inference=inference)

    def fail_then_succeed(x, mask, state):
        with pytest.raises(ValueError, match=message):
            layer(x, state, mask=mask)
        return layer(x, state)

    axes = {"in_axes": (0, 0, None), "out_axes": (0, None)}
    forward = jax.vmap(fail_then_succeed, axis_name="batch", **axes)
    y, _ = forward(X, np.ones(shape, bool), copy(state))
    close(y, call(layer, state, X)[0])


# In these tests the annotations are checked and speak first, so look at what a user sees, in a
# process of its own.
WRONG_DTYPES = """
import jax, equinox as eqx, numpy as np
from eqx_norm import BatchNorm

layer, state = eqx.nn.make_with_state(BatchNorm)(3, "batch", approach="batch")

def fail_then_succeed(x, mask, state):
    try:
        layer(x, state, mask=mask)
    except TypeError as error:
        print(error)
    return layer(x, state)

axes = dict(in_axes=(0, 0, None), out_axes=(0, None))
for dtype in (np.float32, np.int32):
    mask = np.ones((6, 5), dtype)
    _, state = jax.vmap(fail_then_succeed, axis_name="batch", **axes)(
        np.ones((6, 3, 5), np.float32), mask, state
    )
"""


def test_a_wrong_dtype():
    command = [sys.executable, "-c", WRONG_DTYPES]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for line, dtype in zip(run.stdout.splitlines(), ("float32", "int32"), strict=True):
        assert line.startswith(f"mask has dtype {dtype}")
        assert "give booleans, for example mask > 0" in line
