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
    call_members = filter_jit(eqx.filter_vmap(forward))
    _, states = call_members(layers, states, x, None)
    for given in (None, masks):
        ys, after = call_members(layers, copy(states), x, given)
        for i in range(3):
            mask = None if given is None else given[i]
            alone = call_masked(member(layers, i), copy(member(states, i)), x[i], mask)
            all_close(alone, (ys[i], member(after, i)))


@pytest.mark.parametrize("mask", [None, LENGTHS], ids=["whole", "masked"])
def test_a_vmap_inside_of_the_batch(mask):
    """The named axis is the outer one, and the several batches share layer, state and mask."""
    layer, state = trained("batch")

    def one(x, mask, state):
        return layer(x, state, mask=mask)

    inside = jax.vmap(one, in_axes=(0, None, None))
    axes = {"in_axes": (1, 0, None), "out_axes": (1, None)}
    xs = normal(6, (2, *X.shape))
    ys, states = jit(jax.vmap(inside, axis_name="batch", **axes))(xs, mask, copy(state))
    for i in range(2):
        alone = call_masked(layer, copy(state), xs[i], mask)
        all_close(alone, (ys[i], member(states, i)))


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


@pytest.mark.parametrize(
    ("approach", "unbiased"), [*((approach, False) for approach in APPROACHES), ("batch", True)]
)
def test_one_program_serves_all_masks_and_both_modes(approach, unbiased):
    """Plain `jax.jit` takes the layer, and the mode, as arguments."""
    layer, state = trained(approach, unbiased=unbiased)
    inference_only = eqx.nn.inference_mode(layer)

    @jit
    @eqx.debug.assert_max_traces(max_traces=1)
    def run(layer, state, x, mask, inference):
        return masked(functools.partial(layer, inference=inference))(x, mask, state)

    for mask in (LENGTHS, NOT_THE_FIRST):
        y, new = run(layer, copy(state), X, mask, False)
        right, right_state = call(layer, copy(state), unpadded(X, mask))
        close(unpadded(y, mask), right)
        all_close(new, right_state)
        inferred, unchanged = run(layer, copy(state), X, mask, True)
        close(inferred, call_masked(inference_only, copy(state), X, mask)[0])
        chex.assert_trees_all_equal(unchanged, state)


@pytest.mark.parametrize(
    ("how", "mask"),
    [
        ({"activation": jax.nn.relu}, None),
        ({}, LENGTHS[3]),
    ],
    ids=["relu", "mask"],
)
def test_without_jit(how, mask):
    """A primitive that is evaluated by a compiled program must not call itself for ever."""
    layer, state = make(C, "batch", approach="smooth_start", **how)
    row = jax.vmap(LayerNorm(X.shape[1:], activation=jax.nn.silu))

    def loss(x):
        y, after = over_batch(functools.partial(layer, mask=mask))(x, copy(state))
        return jnp.sum(jnp.sin(y) + jnp.sin(row(x))), after.get(layer.memory_index).statistics

    derive = jax.grad(loss, has_aux=True)
    with jax.disable_jit():
        ours = derive(X)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(jit(derive)(X)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


# In a process of its own, because the number of CPU devices is fixed when JAX starts.
SHARDED = """
import jax, numpy as np
from jax.sharding import PartitionSpec as P
from tests.helpers import make
from tests.layers.masking import masked

mesh = jax.make_mesh((2,), ("devices",), axis_types=(jax.sharding.AxisType.Auto,))
specs = dict(in_specs=(P("devices"), P("devices"), P()), out_specs=(P("devices"), P()))
x = 5 + 2 * jax.random.normal(jax.random.key(0), (8, 3, 5))

for names, approach in (("batch", "devices"), "batch"), (("devices", "batch"), "smooth_start"):
    one, state = make(3, "batch", approach=approach)
    layer, _ = make(3, names, approach=approach)
    sharded = jax.shard_map(masked(layer), mesh=mesh, check_vma=False, **specs)

    def differentiated(f):
        def loss(x, mask):
            y, after = f(x, mask, state)
            return (y ** 3).sum(), (y, after)
        return jax.jit(jax.grad(loss, has_aux=True))

    ours, right = differentiated(sharded), differentiated(masked(one))
    for left in (1, 0):
        mask = np.ones((8, 5), bool)
        mask[:4] = False
        mask[0, :left] = True
        results = ours(np.where(mask[:, None], x, np.nan), mask), right(x, mask)
        for a, b in zip(*map(jax.tree.leaves, results), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-5)
    dx, (y, after) = ours(np.full_like(x, np.nan), np.zeros_like(mask))
    assert not y.any() and not dx.any()
    for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(state), strict=True):
        assert a.tobytes() == b.tobytes()
"""


def test_unequal_counts_over_devices():
    """One device has a single value that counts, or none; then nothing counts on either."""
    on_devices(2, "-c", SHARDED, flags=XLA_FLAGS)


@pytest.mark.parametrize("activation", [None, jax.nn.silu, eqx.nn.PReLU()])
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("LayerNorm", "n, 4, 3, 6"),
        ("inference", "n, 4, 3, 6"),
        ("inference", "n, 4, h, w"),
        ("inference", "n, 4, h, 2*h"),
    ],
)
def test_exported_for_sizes_that_are_not_known_yet(kind, sizes, activation):
    """Tests those axes that Equinox's layers allow, on platforms that are not here, too."""
    if kind == "LayerNorm":
        call = jax.vmap(LayerNorm((4, 3, 6), activation=activation))
    else:
        layer, state = make(4, "batch", approach="batch", activation=activation)
        call = lambda x: over_batch(eqx.nn.inference_mode(layer))(x, copy(state))[0]  # noqa: E731

    def both(x):
        return jax.value_and_grad(lambda x: jnp.sum(jnp.sin(call(x))))(x)

    symbols = jax.ShapeDtypeStruct(jax.export.symbolic_shape(sizes), jnp.float32)
    exported = jax.export.export(jax.jit(both), platforms=("cpu", "cuda", "tpu"))(symbols)
    x = normal(0, (7, 4, 3, 6))
    for found, right in zip(exported.call(x), both(x), strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["BatchNorm", "LayerNorm"])
def test_nothing_is_sent_to_the_device_by_the_way(kind):
    """Tests `jax_transfer_guard="disallow"`, traced anew and compiled before."""
    layer, state = make(4, "batch", approach="batch", activation=jax.nn.relu)
    row, x = LayerNorm((4, 5), activation=jax.nn.relu), normal(0, (3, 4, 5))
    call = (
        jax.vmap(row) if kind == "LayerNorm" else lambda x: over_batch(layer)(x, copy(state))[0]
    )
    for _ in range(2):
        with jax.transfer_guard("disallow"):
            y, pull_back = jax.vjp(call, x)
            assert pull_back(y)[0].shape == x.shape
