"""Every transformation of JAX and Equinox that the layer has to work under."""

import functools

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from eqx_norm import BatchNorm

from .helpers import APPROACHES, call, call_and_grad, copy, make, member, normal, over_batch

X = normal(0, (6, 3, 2), 1, 2)
DX = normal(1, (6, 3, 2))
each_approach = pytest.mark.parametrize("approach", APPROACHES)


def trained(approach):
    """A layer after two batches, so that its memory matters."""
    layer, state = make(3, "batch", approach=approach, momentum=0.7)
    for seed in (5, 6):
        _, state = call(layer, state, normal(seed, X.shape, 1, 3))
    return layer, state


def output(layer, state, x):
    return over_batch(layer)(x, copy(state))[0]


@each_approach
def test_derivatives_agree_with_finite_differences(approach):
    layer, state = trained(approach)

    def f(x):
        return jnp.sum(jnp.sin(output(layer, state, x)))

    # In float64, so that the error of a central difference is h^2 and not rounding.
    with jax.enable_x64(True):
        layer, state = jax.tree.map(
            lambda a: a.astype(jnp.float64) if eqx.is_inexact_array(a) else a, (layer, state)
        )
        x, dx = X.astype(jnp.float64), DX.astype(jnp.float64)
        h = 1e-5
        difference = (f(x + h * dx) - f(x - h * dx)) / (2 * h)
        value, slope = jax.jvp(f, (x,), (dx,))
        np.testing.assert_allclose(slope, difference, rtol=1e-8)
        np.testing.assert_allclose(jnp.vdot(jax.grad(f)(x), dx), slope, rtol=1e-12)
        assert value.dtype == jnp.float64

        # Second order: the Hessian along dx is the difference of two gradients.
        hessian = jax.hessian(f)(x).reshape(x.size, x.size)
        along = (jax.grad(f)(x + h * dx) - jax.grad(f)(x - h * dx)) / (2 * h)
        np.testing.assert_allclose(hessian @ dx.ravel(), along.ravel(), rtol=1e-6, atol=1e-8)


@each_approach
def test_x64_layers_remember_in_float64(approach):
    with jax.enable_x64(True):
        layer, state = make(3, "batch", approach=approach)
        for x in (X, X.astype(jnp.float64)):
            y, state = call(layer, state, x)
            assert y.dtype == x.dtype
            floats = [leaf for leaf in jax.tree.leaves(state) if eqx.is_inexact_array(leaf)]
            assert {leaf.dtype for leaf in floats} == {jnp.dtype(jnp.float64)}
            y, _ = call(eqx.nn.inference_mode(layer), copy(state), x)
            assert y.dtype == x.dtype


@each_approach
def test_scan_equals_a_loop(approach):
    layer, state = make(3, "batch", approach=approach, momentum=0.7)
    xs = normal(3, (5, *X.shape), 2, 3)

    @jax.jit
    def scanned(state, xs):
        def step(state, x):
            y, state = over_batch(layer)(x, state)
            return state, y

        return lax.scan(step, state, xs)

    scanned_state, scanned_ys = scanned(copy(state), xs)
    for x, scanned_y in zip(xs, scanned_ys, strict=True):
        y, state = call(layer, state, x)
        np.testing.assert_allclose(y, scanned_y, atol=1e-6)
    chex.assert_trees_all_close(state, scanned_state, atol=1e-6)


@each_approach
def test_checkpoint_changes_nothing(approach):
    layer, state = trained(approach)
    y, new_state, (_, dx) = call_and_grad(layer, copy(state), X, DX)
    checkpointed = eqx.filter_checkpoint(layer)
    remat_y, remat_state, (_, remat_dx) = call_and_grad(checkpointed, state, X, DX)
    chex.assert_trees_all_close((y, dx, new_state), (remat_y, remat_dx, remat_state), atol=1e-6)


@each_approach
def test_ensemble_is_each_member_alone(approach):
    @eqx.filter_vmap
    def members(key):
        layer, state = make(3, "batch", approach=approach, momentum=0.7)
        weight = jax.random.normal(key, (3,))
        return eqx.tree_at(lambda m: m.weight, layer, weight), state

    layers, states = members(jax.random.split(jax.random.key(0), 3))
    x = normal(4, (3, *X.shape), 1, 2)
    run = eqx.filter_jit(eqx.filter_vmap(lambda m, s, x: over_batch(m)(x, s)))
    _, states = run(layers, states, x)
    ys, after = run(layers, copy(states), x)
    for i in range(3):
        y, state = call(member(layers, i), member(states, i), x[i])
        np.testing.assert_allclose(y, ys[i], atol=1e-6)
        chex.assert_trees_all_close(state, member(after, i), atol=1e-6)


@pytest.mark.parametrize("outer", [True, False], ids=["unnamed outside", "unnamed inside"])
def test_nested_vmaps_without_a_name(outer):
    layer, state = make(3, "batch", approach="batch")
    x = normal(0, (4, 6, 3, 2))
    if outer:
        y, states = jax.vmap(over_batch(layer), in_axes=(0, None))(x, copy(state))
    else:
        inside = jax.vmap(layer, in_axes=(0, None))
        y, states = jax.vmap(inside, axis_name="batch", in_axes=(1, None), out_axes=(1, None))(
            x, copy(state)
        )
    for i in range(4):
        right, right_state = call(layer, copy(state), x[i])
        np.testing.assert_allclose(y[i], right, atol=1e-6)
        chex.assert_trees_all_close(right_state, member(states, i), atol=1e-6)


@each_approach
@pytest.mark.parametrize("names", [("a", "b"), ["a", "b"]], ids=["tuple", "list"])
def test_several_axis_names_are_one_large_batch(approach, names):
    several, state = make(3, names, approach=approach, momentum=0.7)
    one, one_state = make(3, "batch", approach=approach, momentum=0.7)
    x = normal(0, (4, 5, 3, 2), 2, 3)
    mapped = several
    for name in ("a", "b"):
        mapped = over_batch(mapped, name)
    _, state = mapped(2 * x, state)
    y, state = mapped(x, state)
    _, one_state = call(one, one_state, 2 * x.reshape(20, 3, 2))
    one_y, one_state = call(one, one_state, x.reshape(20, 3, 2))
    np.testing.assert_allclose(y.reshape(20, 3, 2), one_y, atol=1e-6)
    assert jax.tree.structure(state) == jax.tree.structure(one_state)
    chex.assert_trees_all_close(
        jax.tree.leaves(state), jax.tree.leaves(one_state), atol=1e-6, rtol=1e-6
    )


@each_approach
def test_plain_jit_takes_the_layer_as_an_argument(approach):
    """Equinox's layer fails here: its axis name is no JAX type (issue 1074)."""
    layer, state = trained(approach)

    @jax.jit
    def run(layer, state, x):
        return over_batch(layer)(x, state)

    for model in (layer, eqx.nn.inference_mode(layer)):
        y, new_state = run(model, copy(state), X)
        right, right_state = call(model, copy(state), X)
        np.testing.assert_allclose(y, right, atol=1e-6)
        chex.assert_trees_all_close(new_state, right_state, atol=1e-6)


def test_one_program_serves_both_modes_where_the_flag_is_traced():
    layer, state = trained("batch")

    traces = 0

    @jax.jit
    def run(state, x, inference):
        nonlocal traces
        traces += 1
        f = functools.partial(layer, inference=inference)
        return over_batch(f)(x, state)

    training, inference = (run(copy(state), X, flag) for flag in (False, True))
    np.testing.assert_allclose(training[0], call(layer, copy(state), X)[0], atol=1e-6)
    chex.assert_trees_all_equal(inference[1], state)
    assert traces == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_in_and_out(dtype):
    layer, state = make(3, "batch", approach="ema", dtype=dtype)
    y, state = call(layer, state, X.astype(dtype))
    assert y.dtype == dtype
    memory = state.get(layer.memory_index)
    assert memory.mean.dtype == memory.variance.dtype == jnp.float32


@each_approach
def test_strict_dtype_promotion(approach):
    with jax.numpy_dtype_promotion("strict"):
        layer, state = make(3, "batch", approach=approach)
        for dtype in (jnp.float32, jnp.bfloat16):
            y, state, _ = call_and_grad(layer, state, X.astype(dtype), DX.astype(dtype))
            call(eqx.nn.inference_mode(layer), copy(state), X.astype(dtype))
            assert y.dtype == dtype


def test_two_layers_are_equal_keys_of_one_compiled_function():
    """Static fields are hashable and compare by value: a new layer is not a new program."""
    count = 0

    @eqx.filter_jit
    def run(layer, state, x):
        nonlocal count
        count += 1
        return over_batch(layer)(x, state)

    for _ in range(2):
        run(*make(3, ["batch"], approach=BatchNorm(3, "b", approach="ema").approach), X)
    assert count == 1
