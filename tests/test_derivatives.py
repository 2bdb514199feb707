"""Derivatives of all orders, by every transformation, are those of the written-out formula."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from eqx_norm.strategies import Running

from .helpers import APPROACHES, bits, copy, make, over_batch

N, C, L = 4, 2, 3
MOMENTUM, SEEN = 0.7, np.array(0.51)
ACTIVATIONS = {
    "none": None,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
}
RANDOM = np.random.RandomState(0)
X, DX, COTANGENT = RANDOM.standard_normal((3, N, C, L))
VECTORS, D_VECTORS = (
    (np.array([1.5, 0.5]), np.array([0.2, -0.3])),
    RANDOM.standard_normal((2, C)),
)
MEAN, VARIANCE = np.array([0.5, 1.0]), np.array([2.0, 0.7])


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def arrays(dtype: Any = np.float64):
    """weight, bias, x, and a direction of each."""
    primals, tangents = ((*v, x) for v, x in ((VECTORS, X), (D_VECTORS, DX)))
    return tuple(tuple(jnp.asarray(a, dtype) for a in side) for side in (primals, tangents))


def ours(approach, activation, run=over_batch):
    """weight, bias, x -> y."""
    layer, state = make(C, "batch", approach=approach, momentum=MOMENTUM, activation=activation)
    memory = jax.tree.leaves(state.get(layer.memory_index))[0].dtype
    running = Running(*(jnp.asarray(a, memory) for a in (MEAN, VARIANCE, SEEN)))
    if approach != "variance_clip":  # which starts to clip, and differ from "batch", later
        state = state.set(layer.memory_index, running)

    def f(weight, bias, x):
        model = eqx.tree_at(lambda m: (m.weight, m.bias), layer, (weight, bias))
        return run(model)(x, copy(state))[0]

    return f


def definition(approach, activation):
    def f(weight, bias, x):
        return one_step(approach, activation, (weight, bias), (MEAN, VARIANCE, SEEN), x)[0]

    return f


def one_step(approach, activation, vectors, memory, x):
    weight, bias = vectors
    batch = x.mean((0, 2)), x.var((0, 2))
    *old, seen = jax.lax.stop_gradient(memory)
    seen = MOMENTUM * seen + (1 - MOMENTUM)
    running = [m + (1 - MOMENTUM) / seen * (b - m) for b, m in zip(batch, old, strict=True)]
    mean, variance = {
        "batch": batch,
        "variance_clip": batch,
        "ema": running,
        "adam": running,
        "smooth_start": [
            seen * r + (1 - seen) * b for r, b in zip(running, batch, strict=True)
        ],
    }[approach]
    y = (x - mean[:, None]) / jnp.sqrt(variance[:, None] + 1e-5)
    y = y * weight[:, None] + bias[:, None]
    y = y if activation is None else activation(y)
    return y, (*running, jnp.ones_like(seen) if approach == "ema" else seen)


def loss_of(f):
    return lambda *primals: jnp.sum(jnp.sin(f(*primals)) * COTANGENT.astype(primals[-1].dtype))


def along(f, primals, tangents):
    return lambda t: f(*(p + t * d for p, d in zip(primals, tangents, strict=True)))


def slope(f):
    return lambda t: jax.jvp(f, (t,), (jnp.ones_like(t),))[1]


EVERY = (0, 1, 2)


def gradient(f, primals, tangents):
    return jax.grad(loss_of(f), EVERY)(*primals)


def directional(f, primals, tangents):
    return jax.jvp(f, primals, tangents)


def jacobian(f, primals, tangents):
    return jax.jacfwd(f, EVERY)(*primals)


def hessian(f, primals, tangents):
    return jax.hessian(loss_of(f), EVERY)(*primals)


def linearized(f, primals, tangents):
    y, linear = jax.linearize(f, *primals)
    return y, linear(*tangents), jax.linear_transpose(linear, *primals)(y)


def rematerialised(f, primals, tangents):
    return gradient(jax.checkpoint(f), primals, tangents)


def slope_of_gradient(f, primals, tangents):
    return jax.jvp(jax.grad(loss_of(f), EVERY), primals, tangents)[1]


def gradient_of_slope(f, primals, tangents):
    return jax.grad(lambda *p: jax.jvp(loss_of(f), p, tangents)[1], EVERY)(*primals)


def gradient_of_gradient(f, primals, tangents):
    """The gradient penalty of adversarial training."""
    inner = jax.grad(loss_of(f), 2)
    return jax.grad(lambda *p: jnp.sum(inner(*p) ** 2), EVERY)(*primals)


def third_order(f, primals, tangents):
    return slope(slope(slope(along(loss_of(f), primals, tangents))))(jnp.zeros(()))


def ensemble_of_gradients(f, primals, tangents):
    stacked = [jnp.stack([p, p + d, p - d]) for p, d in zip(primals, tangents, strict=True)]
    return jax.vmap(jax.grad(loss_of(f), EVERY))(*stacked)


def gradient_of_ensemble(f, primals, tangents):
    """All members share the vectors, so that their gradients are summed."""
    x, dx = primals[2], tangents[2]
    together = jax.vmap(loss_of(f), in_axes=(None, None, 0))
    stacked = jnp.stack([x, x + dx, 2 * x])
    return jax.grad(lambda *p: jnp.sum(together(*p)), EVERY)(*primals[:2], stacked)


FIRST_ORDER = (gradient, directional, jacobian, linearized, rematerialised)
ENSEMBLES = (ensemble_of_gradients, gradient_of_ensemble)
HIGHER = (hessian, slope_of_gradient, gradient_of_slope, gradient_of_gradient, third_order)

# What is tested are rules of differentiation: they need no program that took long to compile.
compiled = functools.partial(
    jax.jit, static_argnums=0, compiler_options={"xla_backend_optimization_level": 0}
)


def assert_agree(transforms, f, right, primals, tangents, **tolerance):
    """All transforms of one function are one program."""

    @compiled
    def derive(f, primals, tangents):
        return {t.__name__: t(f, primals, tangents) for t in transforms}

    results, rights = derive(f, primals, tangents), derive(right, primals, tangents)
    for name, result in results.items():
        for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(rights[name]), strict=True):
            assert a.dtype == primals[-1].dtype
            np.testing.assert_allclose(a, b, err_msg=name, **tolerance)


exactly: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-10}
each_activation = pytest.mark.parametrize("name", ACTIVATIONS)
some_approaches = pytest.mark.parametrize("approach", ["batch", "ema", "smooth_start"])


@pytest.mark.parametrize(
    ("approach", "name"),
    [
        *(("batch", name) for name in ACTIVATIONS),
        ("ema", "none"),
        ("ema", "relu"),
        ("smooth_start", "none"),
        ("smooth_start", "gelu"),
    ],
)
def test_first_order(approach, name, x64):
    pair = (f(approach, ACTIVATIONS[name]) for f in (ours, definition))
    assert_agree(FIRST_ORDER, *pair, *arrays(), **exactly)


@pytest.mark.parametrize("approach", sorted({*APPROACHES} - {"batch", "ema", "smooth_start"}))
def test_the_other_approaches(approach, x64):
    pair = (f(approach, jax.nn.silu) for f in (ours, definition))
    assert_agree((gradient, slope_of_gradient), *pair, *arrays(), **exactly)


@pytest.mark.parametrize(
    ("approach", "name"),
    [("batch", "none"), ("smooth_start", "relu"), ("ema", "silu"), ("batch", "gelu")],
)
def test_higher_orders(approach, name, x64):
    pair = (f(approach, ACTIVATIONS[name]) for f in (ours, definition))
    assert_agree(HIGHER, *pair, *arrays(), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", ["none", "gelu"])
def test_ensembles(name, x64):
    pair = (f("batch", ACTIVATIONS[name]) for f in (ours, definition))
    assert_agree(ENSEMBLES, *pair, *arrays(), **exactly)


@each_activation
def test_float32_against_the_formula_in_float64(name):
    @compiled
    def derive(f, primals, tangents):
        transforms = gradient, directional, slope_of_gradient, gradient_of_gradient
        return [transform(f, primals, tangents) for transform in transforms]

    results = derive(ours("batch", ACTIVATIONS[name]), *arrays(np.float32))
    with jax.enable_x64(True):
        rights = derive(definition("batch", ACTIVATIONS[name]), *arrays())
    for a, b in zip(jax.tree.leaves(results), jax.tree.leaves(rights), strict=True):
        assert a.dtype == np.float32
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_finite_differences(x64):
    f = jax.jit(ours("smooth_start", jax.nn.gelu))
    check_grads(f, arrays()[0], order=2, modes=("fwd", "rev"), eps=1e-5)


def test_compiled_before_it_is_differentiated(x64):
    """Then what is differentiated has been mapped already: grad(jit(vmap(layer)))."""

    def mapped_and_compiled(model):
        return jax.jit(over_batch(model))

    f, right = ours("batch", jax.nn.silu, mapped_and_compiled), definition("batch", jax.nn.silu)
    for transform in (gradient, slope_of_gradient):
        expected = compiled(transform)(right, *arrays())
        for derive in (transform, compiled(transform)):
            result = derive(f, *arrays())
            for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
                np.testing.assert_allclose(a, b, **exactly)


@pytest.mark.parametrize("name", ["none", "silu"])
@some_approaches
def test_a_gradient_taken_inside_of_the_named_vmap(approach, name, x64):
    """Each example's loss also depends on the others: JAX adds up what they send back."""

    def inside(model):
        def one(x, c, state):
            def loss(vectors, x):
                with_vectors = eqx.tree_at(lambda m: (m.weight, m.bias), model, vectors)
                return jnp.vdot(jnp.sin(with_vectors(x, state)[0]), c)

            return jax.grad(loss, (0, 1))((model.weight, model.bias), x), None

        axes = {"axis_name": "batch", "in_axes": (0, 0, None), "out_axes": 0}
        return lambda x, state: jax.vmap(one, **axes)(x, jnp.asarray(COTANGENT), state)

    primals, tangents = arrays()
    (dweights, dbiases), dx = jax.jit(ours(approach, ACTIVATIONS[name], inside))(*primals)
    right = compiled(gradient)(definition(approach, ACTIVATIONS[name]), primals, tangents)
    for a, b in zip((dweights.sum(0), dbiases.sum(0), dx), right, strict=True):
        np.testing.assert_allclose(a, b, **exactly)


@pytest.mark.parametrize("activation", [None, jax.nn.silu], ids=["none", "silu"])
@some_approaches
def test_through_all_steps_of_a_scan(approach, activation, x64):
    """No gradient flows from one step to the next by way of the memory."""
    layer, state = make(C, "batch", approach=approach, momentum=MOMENTUM, activation=activation)
    memory = Running(*map(jnp.asarray, (MEAN, VARIANCE, SEEN)))

    def our_step(vectors, state, x):
        model = eqx.tree_at(lambda m: (m.weight, m.bias), layer, vectors)
        y, state = over_batch(model)(x, state)
        return state, y

    def right_step(vectors, memory, x):
        y, memory = one_step(approach, activation, vectors, memory, x)
        return memory, y

    def loss(step, init, vectors, x):
        def body(carry, scale):
            x, state = carry
            state, y = step(vectors, state, scale * x)
            return (x + jnp.sin(y), state), y

        _, ys = jax.lax.scan(body, (x, init), jnp.array([1.0, 0.5, 2.0]))
        return jnp.sum(jnp.cos(ys) * COTANGENT)

    (*vectors, x), _ = arrays()
    derive = compiled(jax.grad(loss, (2, 3)))
    result = derive(our_step, state.set(layer.memory_index, memory), tuple(vectors), x)
    right = derive(right_step, (MEAN, VARIANCE, SEEN), tuple(vectors), x)
    for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(a, b, **exactly)


@pytest.mark.parametrize("name", ["none", "silu"])
def test_x_that_does_not_vary_over_the_named_axis(name, x64):
    def same_for_all(model):
        return jax.vmap(
            model, axis_name="batch", in_axes=(None, None), out_axes=(0, None), axis_size=N
        )

    (weight, bias, x), (*d_vectors, dx) = arrays()
    f = ours("smooth_start", ACTIVATIONS[name], same_for_all)
    right = definition("smooth_start", ACTIVATIONS[name])

    def repeated(weight, bias, x):
        return right(weight, bias, jnp.broadcast_to(x, (N, C, L)))

    one = (weight, bias, x[0]), (*d_vectors, dx[0])
    assert_agree((gradient, directional, slope_of_gradient), f, repeated, *one, **exactly)


@some_approaches
def test_no_gradient_flows_into_memory(approach):
    layer, state = make(C, "batch", approach=approach, activation=jax.nn.silu)
    x = jnp.asarray(X, jnp.float32)

    @eqx.filter_jit
    @eqx.filter_grad
    def remembered(both):
        layer, x = both
        _, new_state = over_batch(layer)(x, copy(state))
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(new_state.get(layer.memory_index)))

    @jax.jit
    @jax.grad
    def output(memory):
        return jnp.sum(over_batch(layer)(x, state.set(layer.memory_index, memory))[0] ** 2)

    dlayer, dx = remembered((layer, x))
    dmemory = output(Running(*(jnp.asarray(a, jnp.float32) for a in (MEAN, VARIANCE, 1))))
    for gradient in jax.tree.leaves((dlayer, dx, dmemory)):
        np.testing.assert_array_equal(gradient, np.zeros(gradient.shape))


def scaled(scale, u):
    return scale * jax.nn.silu(u * scale)


class Scaled(eqx.Module):
    scale: jax.Array

    def __call__(self, u):
        return scaled(self.scale, u)


@pytest.mark.parametrize(
    "activation",
    [
        eqx.nn.PReLU(0.25),
        eqx.nn.PReLU(jnp.full((C, 1), 0.3)),
        Scaled(jnp.array(1.3)),
    ],
    ids=["prelu", "prelu of channels", "module"],
)
def test_the_parameters_of_an_activation(activation):
    inside, state = make(C, "batch", approach="batch", activation=activation)
    plain, _ = make(C, "batch", approach="batch")
    x = jnp.asarray(X, jnp.float32)

    def loss(y):
        return jnp.sum(jnp.sin(y) * COTANGENT.astype(np.float32))

    @eqx.filter_jit
    @eqx.filter_grad
    def ours(model):
        layer, x = model
        return loss(over_batch(layer)(x, copy(state))[0])

    @eqx.filter_jit
    @eqx.filter_grad
    def afterwards(model):
        layer, activation, x = model
        return loss(jax.vmap(activation)(over_batch(layer)(x, copy(state))[0]))

    layer, dx = ours((inside, x))
    right_layer, right_activation, right_dx = afterwards((plain, activation, x))
    result = layer.activation, layer.weight, layer.bias, dx
    right = right_activation, right_layer.weight, right_layer.bias, right_dx
    assert jax.tree.leaves(layer.activation)
    for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("by_jit", [False, True], ids=["function", "jitted function"])
def test_an_activation_that_closes_over_what_is_differentiated(by_jit):
    x = jnp.asarray(X, jnp.float32)

    def loss(scale, inside):
        def function(u):
            return scaled(scale, u)

        function = jax.jit(function) if by_jit else function
        layer, state = make(
            C, "batch", approach="batch", activation=function if inside else None
        )
        y, _ = over_batch(layer)(x, state)
        return jnp.sum(jnp.sin(y if inside else function(y)))

    for derivative in (jax.grad, jax.jacfwd):
        derive = jax.jit(derivative(loss), static_argnums=1)
        np.testing.assert_allclose(derive(1.3, True), derive(1.3, False), rtol=1e-5)


@pytest.mark.parametrize("name", ["relu", "silu", "gelu"])
def test_an_activation_inside_is_the_same_as_afterwards(name):
    activation = ACTIVATIONS[name]
    (weight, bias, x), tangents = arrays(np.float32)
    inside = ours("batch", activation)
    plain = ours("batch", None)

    def afterwards(*primals):
        return activation(plain(*primals))

    y, right = (jax.jit(f)(weight, bias, x) for f in (inside, afterwards))
    np.testing.assert_allclose(y, right, rtol=1e-6, atol=1e-6)
    if name == "relu":
        assert bits(y) == bits(right)
    gradients, right = (
        compiled(gradient)(f, (weight, bias, x), tangents) for f in (inside, afterwards)
    )
    for a, b in zip(gradients, right, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "wrong",
    [jnp.sum, lambda u: u[:1], lambda u: u.T, lambda u: jnp.stack([u, u])],
    ids=["scalar", "one channel", "transposed", "two"],
)
def test_an_activation_that_changes_the_shape(wrong):
    layer, state = make(C, "batch", approach="batch", activation=wrong)
    good, _ = make(C, "batch", approach="batch")

    def fail_then_succeed(x, state):
        with pytest.raises(ValueError, match="activation"):
            layer(x, state)
        return good(x, state)

    over_batch(fail_then_succeed)(jnp.asarray(X, jnp.float32), state)
