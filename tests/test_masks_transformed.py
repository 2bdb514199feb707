"""Masks under every transformation, and unequal counts over several axes and devices."""

import functools

import chex
import jax
import numpy as np
import pytest

from .compiling import XLA_FLAGS, jit
from .helpers import APPROACHES, copy, member, normal
from .helpers import quick_call as call
from .masking import (
    LENGTHS,
    NOT_THE_FIRST,
    C,
    L,
    N,
    X,
    call_masked,
    close,
    masked,
    trained,
    unpadded,
    untrained,
)
from .processes import on_devices

# The rest of a statistic is no larger than a rounding of it, and any number up to that.
all_close = functools.partial(chex.assert_trees_all_close, rtol=1e-6, atol=1e-6)


def test_masks_are_traced():
    layer, state = trained("batch")
    traces = 0

    @jit
    def run(state, x, mask, inference):
        nonlocal traces
        traces += 1
        return masked(functools.partial(layer, inference=inference))(x, mask, state)

    for mask in (LENGTHS, NOT_THE_FIRST):
        y, new = run(copy(state), X, mask, False)
        right, right_state = call(layer, copy(state), unpadded(X, mask))
        close(unpadded(y, mask), right)
        all_close(new, right_state)
        _, unchanged = run(copy(state), X, mask, True)
        chex.assert_trees_all_equal(unchanged, state)
    assert traces == 1


def test_scan_over_batches_of_different_lengths():
    layer, state = trained("smooth_start")
    xs = normal(5, (3, *X.shape), 2, 3)
    masks = np.stack([LENGTHS, np.zeros_like(LENGTHS), NOT_THE_FIRST])
    over_batch_and_masks = masked(layer)

    @jit
    def scan(state, xs, masks):
        def one(state, x_and_mask):
            x, mask = x_and_mask
            y, state = over_batch_and_masks(x, mask, state)
            return state, y

        return jax.lax.scan(one, state, (xs, masks))

    scanned, _ = scan(copy(state), xs, masks)
    for i in (0, 2):
        _, state = call(layer, state, unpadded(xs[i], masks[i]))
    all_close(scanned, state)


@pytest.mark.parametrize("mask_axis", [0, None], ids=["own masks", "one mask"])
def test_ensemble(mask_axis):
    layer, state = trained("batch")
    xs = normal(6, (2, *X.shape))
    masks = np.stack([LENGTHS, NOT_THE_FIRST]) if mask_axis == 0 else LENGTHS
    members = jit(jax.vmap(masked(layer), in_axes=(0, mask_axis, None)))
    ys, states = members(xs, masks, copy(state))
    for i in range(2):
        mask = masks[i] if mask_axis == 0 else masks
        y, new = call_masked(layer, copy(state), xs[i], mask)
        close(y, ys[i])
        all_close(new, member(states, i))


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
    both = jit(both)
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
    on_devices(2, "-c", SHARDED, flags=XLA_FLAGS)
