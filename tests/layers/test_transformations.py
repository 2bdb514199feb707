"""Tests every transformation of JAX and Equinox that the layers have to work under.

Derivatives of all orders, and through a scan: tests/operation/test_derivatives.py.
"""

import functools

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm import LayerNorm
from tests.compiling import XLA_FLAGS, filter_jit, jit
from tests.helpers import (
    APPROACHES,
    copy,
    each_approach,
    make,
    member,
    normal,
    over_batch,
)
from tests.helpers import quick_call as call
from tests.helpers import quick_call_and_grad as call_and_grad
from tests.layers.masking import (
    LENGTHS,
    NOT_THE_FIRST,
    C,
    L,
    N,
    X,
    all_close,
    call_masked,
    close,
    forward,
    masked,
    trained,
    unpadded,
    untrained,
)
from tests.processes import on_devices

pytestmark = pytest.mark.x32  # slow, and no transformation changes a dtype
DX = normal(1, X.shape)


@each_approach
def test_checkpoint_changes_nothing(approach):
    layer, state = trained(approach)
    y, new_state, (_, dx) = call_and_grad(layer, copy(state), X, DX)
    checkpointed = eqx.filter_checkpoint(layer)
    remat_y, remat_state, (_, remat_dx) = call_and_grad(checkpointed, state, X, DX)
    all_close((y, dx, new_state), (remat_y, remat_dx, remat_state))


@each_approach
def test_ensemble_is_each_member_alone(approach):
    masks = jnp.stack([LENGTHS, np.zeros_like(LENGTHS), NOT_THE_FIRST])

    @eqx.filter_vmap
    def members(key):
        layer, state = untrained(approach)
        weight = jax.random.normal(key, (C,), jnp.float32)
        return eqx.tree_at(lambda m: m.weight, layer, weight), state

    layers, states = members(jax.random.split(jax.random.key(0), 3))
    x = normal(4, (3, *X.shape), 1, 2)
    _, states = filter_jit(eqx.filter_vmap(forward))(layers, x, None, states)
    for given in (None, masks):
        ys, after = filter_jit(eqx.filter_vmap(forward))(layers, x, given, copy(states))
        for i in range(3):
            mask = None if given is None else given[i]
            alone = call_masked(member(layers, i), copy(member(states, i)), x[i], mask)
            all_close(alone, (ys[i], member(after, i)))


def of_ensemble(layer):
    """Returns a call for several batches, which share layer, state and mask."""
    return jax.vmap(masked(layer), in_axes=(0, None, None))


def inside_out(layer):
    """Names the outer axis, so that the several batches are the inner one."""

    def one(x, mask, state):
        return layer(x, state, mask=mask)

    inside = jax.vmap(one, in_axes=(0, None, None))
    axes = {"in_axes": (1, 0, None), "out_axes": (1, None)}
    return jax.vmap(inside, axis_name="batch", **axes)


@pytest.mark.parametrize("nested", [of_ensemble, inside_out])
@pytest.mark.parametrize("mask", [None, LENGTHS], ids=["whole", "masked"])
def test_nested_vmaps(mask, nested):
    layer, state = trained("batch")
    xs = normal(6, (2, *X.shape))
    ys, states = jit(nested(layer))(xs, mask, copy(state))
    for i in range(2):
        y, new = call_masked(layer, copy(state), xs[i], mask)
        close(y, ys[i])
        all_close(new, member(states, i))


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
        right, one_state = call(one, one_state, unpadded(scale * x.reshape(N, C, L), flat))
    close(unpadded(y.reshape(N, C, L), flat), right)
    assert jax.tree.structure(state) == jax.tree.structure(one_state)
    all_close(jax.tree.leaves(state), jax.tree.leaves(one_state))


@each_approach
def test_plain_jit_takes_the_layer_as_an_argument(approach):
    layer, state = trained(approach)

    @jit
    def run(layer, state, x):
        return over_batch(layer)(x, state)

    for model in (layer, eqx.nn.inference_mode(layer)):
        y, new_state = run(model, copy(state), X)
        right, right_state = call(model, copy(state), X)
        close(y, right)
        all_close(new_state, right_state)


@pytest.mark.parametrize("unbiased", [False, True])
def test_one_program_serves_all_masks_and_both_modes(unbiased):
    layer, state = trained("batch", unbiased=unbiased)
    inference_only = eqx.nn.inference_mode(layer)
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
        inferred, unchanged = run(copy(state), X, mask, True)
        close(inferred, call_masked(inference_only, copy(state), X, mask)[0])
        chex.assert_trees_all_equal(unchanged, state)
    assert traces == 1


@pytest.mark.parametrize("how", ["relu", "mask", "device_invariant", "LayerNorm, silu"])
def test_without_jit(how):
    """A primitive that is evaluated by a compiled program must not call itself for ever."""
    layer, state = make(
        3,
        "batch",
        approach="smooth_start",
        activation=jax.nn.relu if how == "relu" else None,
        implementation=how if how == "device_invariant" else "auto",
    )
    mask = LENGTHS[3] if how == "mask" else None
    row = LayerNorm(X.shape[1:], activation=jax.nn.silu)

    def loss(x):
        if how == "LayerNorm, silu":
            return jnp.sum(jnp.sin(jax.vmap(row)(x)))
        y, after = over_batch(lambda x, state: layer(x, state, mask=mask))(x, copy(state))
        return jnp.sum(jnp.sin(y)), after.get(layer.memory_index)

    derive = jax.grad(loss, has_aux=how != "LayerNorm, silu")
    with jax.disable_jit():
        ours = derive(X)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(jit(derive)(X)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


# In a process of its own, because the number of CPU devices is fixed when JAX starts.
SHARDED = """
import jax, numpy as np
from jax.sharding import Mesh, PartitionSpec as P
from tests.helpers import make
from tests.layers.masking import masked

def value_and_gradient(f, x, mask, state):
    def loss(x):
        y, new_state = f(x, mask, state)
        return (y ** 3).sum(), (y, new_state)
    return jax.grad(loss, has_aux=True)(x)

mesh = Mesh(np.array(jax.devices()), ("devices",))
assert len(jax.devices()) == 2
x = 5 + 2 * jax.random.normal(jax.random.key(0), (8, 3, 5))
specs = dict(in_specs=(P("devices"), P("devices"), P()), out_specs=(P("devices"), P()))

def check(names, approach):
    one, state = make(3, "batch", approach=approach)
    layer, _ = make(3, names, approach=approach)
    sharded = jax.shard_map(masked(layer), mesh=mesh, check_vma=False, **specs)
    ours = jax.jit(lambda *arrays: value_and_gradient(sharded, *arrays))
    right = jax.jit(lambda *arrays: value_and_gradient(masked(one), *arrays))
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
