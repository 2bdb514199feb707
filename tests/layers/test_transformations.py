"""Tests transformations of JAX and Equinox, and programs that serve several calls.

Derivatives of all orders, and through a scan: tests/operation/test_derivatives.py. Devices:
tests/devices.
"""

import functools

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm import LayerNorm
from tests.compiling import filter_jit, jit
from tests.helpers import APPROACHES, copy, each_approach, make, member, normal
from tests.helpers import quick_call as call
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

pytestmark = pytest.mark.x32  # slow, and no transformation changes a dtype


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
        y, after = run(layer, copy(state), X, mask, False)
        expected, expected_state = call(layer, copy(state), unpadded(X, mask))
        close(unpadded(y, mask), expected)
        all_close(after, expected_state)
        inferred, unchanged = run(layer, copy(state), X, mask, True)
        close(inferred, call_masked(inference_only, copy(state), X, mask)[0])
        chex.assert_trees_all_equal(unchanged, state)


@each_approach
def test_steps_and_equal_layers_are_one_program(approach):
    """Static fields are hashable and compare by value: a new layer is not a new program."""

    @filter_jit
    @eqx.debug.assert_max_traces(max_traces=1)
    def step(layer, state, x):
        return forward(layer, state, x, None)

    for _ in range(2):
        layer, state = make(C, ["batch"], approach=approach)
        for _ in range(3):
            _, state = step(layer, state, X)


def test_without_jit():
    """A primitive that is evaluated by a compiled program must not call itself for ever."""
    layer, state = make(C, "batch", approach="smooth_start", activation=jax.nn.relu)
    row = jax.vmap(LayerNorm(X.shape[1:], activation=jax.nn.silu))

    def loss(x):
        y, after = forward(layer, copy(state), x, LENGTHS)
        return jnp.sum(jnp.sin(y) + jnp.sin(row(x))), after

    derive = jax.grad(loss, has_aux=True)
    with jax.disable_jit():
        outputs = derive(X)
    chex.assert_trees_all_close(outputs, jit(derive)(X), rtol=1e-5, atol=1e-6)
