"""Every transformation of JAX and Equinox that the layer has to work under."""

import functools

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from eqx_norm import BatchNorm, LayerNorm

from .compiling import filter_jit, jit
from .helpers import APPROACHES, copy, make, member, normal, over_batch
from .helpers import quick_call as call
from .helpers import quick_call_and_grad as call_and_grad

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
    h = 1e-5

    @filter_jit
    def derive(layer, state, x, dx):
        def f(x):
            return jnp.sum(jnp.sin(output(layer, state, x)))

        values = jnp.stack([f(x + h * dx), f(x - h * dx)])
        gradients = jnp.stack([jax.grad(f)(at) for at in (x, x + h * dx, x - h * dx)])
        return values, jax.jvp(f, (x,), (dx,)), gradients, jax.hessian(f)(x)

    # In float64, so that the error of a central difference is h^2 and not rounding.
    with jax.enable_x64(True):
        layer, state, x, dx = jax.tree.map(
            lambda a: jnp.asarray(np.float64(a)) if eqx.is_inexact_array(a) else a,
            (layer, state, X, DX),
        )
        values, (value, slope), gradients, hessian = derive(layer, state, x, dx)
    assert value.dtype == jnp.float64
    values, gradients, hessian, dx = map(np.asarray, (values, gradients, hessian, dx))
    np.testing.assert_allclose(slope, (values[0] - values[1]) / (2 * h), rtol=1e-8)
    np.testing.assert_allclose(np.vdot(gradients[0], dx), slope, rtol=1e-12)

    # Second order: the Hessian along dx is the difference of two gradients.
    along = (gradients[1] - gradients[2]) / (2 * h)
    hessian = hessian.reshape(dx.size, dx.size)
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

    @jit
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
    run = filter_jit(eqx.filter_vmap(lambda m, s, x: over_batch(m)(x, s)))
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
        nested = jax.vmap(over_batch(layer), in_axes=(0, None))
    else:
        inside = jax.vmap(layer, in_axes=(0, None))
        nested = jax.vmap(inside, axis_name="batch", in_axes=(1, None), out_axes=(1, None))
    y, states = jit(nested)(x, copy(state))
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
    mapped = jit(over_batch(over_batch(several, "a"), "b"))
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

    @jit
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

    @jit
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
            x, dy = X.astype(dtype), DX.astype(dtype)
            y, state, _ = call_and_grad(layer, state, x, dy)
            assert y.dtype == dtype
            # Whatever is promoted is so before it is compiled.
            call.lower(eqx.nn.inference_mode(layer), state, x)


def test_two_layers_are_equal_keys_of_one_compiled_function():
    """Static fields are hashable and compare by value: a new layer is not a new program."""
    count = 0

    @filter_jit
    def run(layer, state, x):
        nonlocal count
        count += 1
        return over_batch(layer)(x, state)

    for _ in range(2):
        run(*make(3, ["batch"], approach=BatchNorm(3, "b", approach="ema").approach), X)
    assert count == 1


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
    mask = jnp.array([True, False]) if how == "mask" else None
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
