"""Tests that equal layers share compiled code, and that this code never uses old values."""

import contextlib
import functools
from collections.abc import Iterator

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm import BatchNorm, LayerNorm, _memory, normalise
from eqx_norm.strategies import Batch, Moments
from tests.compiling import filter_jit
from tests.helpers import copy, each_approach, make, normal, over_batch, same
from tests.layers.norms import NAMES, made
from tests.strategies.recursions import STRATEGIES

UNOPTIMISED = True  # compares values: tests/compiling.py

X = normal(0, (4, 3))
FACTOR = np.ones(3, np.float32)


def batch_norm(activation):
    layer, state = make(3, "batch", approach="batch", activation=activation)
    return lambda x: over_batch(layer)(x, copy(state))[0]


def layer_norm(activation):
    return jax.vmap(LayerNorm(3, activation=activation))


class Scaled:
    def __call__(self, u):
        return u * FACTOR


@pytest.mark.parametrize(
    ("layer", "activation"),
    [
        (layer_norm, Scaled()),
        (layer_norm, functools.partial(jax.lax.mul, FACTOR)),
        (layer_norm, jax.vmap(eqx.nn.Lambda(lambda u: u * FACTOR[0]))),  # a module of Equinox
        (batch_norm, lambda u: u * FACTOR),
    ],
)
def test_activation_that_reads_a_changed_value_is_traced_again(layer, activation):
    call = jax.value_and_grad(lambda x: layer(activation)(x)[0, 0])
    np.copyto(FACTOR, 1)
    y, slope = call(X)
    np.copyto(FACTOR, 5)
    changed, steeper = call(X)
    np.testing.assert_allclose(changed, 5 * y, rtol=1e-6)
    np.testing.assert_allclose(steeper, 5 * slope, rtol=1e-5)


def surrogate(slope):
    """Returns a step function with a derivative of its own, as spiking networks have."""

    @jax.custom_jvp
    def step(u):
        return jnp.sign(u)

    @step.defjvp
    def _(primals, tangents):
        return step(*primals), slope * tangents[0]

    return step


def jitted(slope):
    return jax.jit(lambda u: u * slope)


@pytest.mark.parametrize(
    ("activation", "constant"), [(surrogate, float), (jitted, jnp.float32)]
)
def test_activations_that_differ_in_a_constant_of_their_derivative(activation, constant):
    def slope(factor):
        norm = layer_norm(activation(constant(factor)))
        return jax.grad(lambda x: jnp.sum(norm(x) * X[::-1]))(X)

    np.testing.assert_allclose(slope(5), 5 * slope(1), rtol=1e-4)


@pytest.mark.parametrize("activation", [jax.nn.relu, functools.partial(jax.nn.elu, alpha=0.5)])
def test_equal_layers_lower_to_one_function(activation):
    layers = [BatchNorm(3, "batch", approach="batch", activation=activation) for _ in range(3)]
    states = [eqx.nn.State(layer) for layer in layers]

    def model(x):
        for layer, state in zip(layers, states, strict=True):
            x, _ = over_batch(layer)(x, copy(state))
        return x

    text = jax.jit(model).lower(X).as_text()
    assert len([line for line in text.splitlines() if "call @call" in line]) == 3
    assert text.count("func.func private @call(") == 1


class Wider(Batch):
    def update(self, batch, memory):
        return Moments.of(batch.mean, 4 * batch.variance), memory


def test_layers_with_different_settings_share_no_program():
    def outputs(**options):
        layer, state = make(3, "batch", **{"approach": Batch(0.99), **options})
        return over_batch(layer)(X, state)

    plain = outputs()
    assert same(outputs(approach="batch"), plain)
    for options in (
        {"eps": 0.5},
        {"activation": functools.partial(jax.nn.elu, alpha=0.5)},
        {"unbiased": True},
        {"approach": Wider(0.99)},
    ):
        assert not same(outputs(**options), plain), options


@pytest.mark.x32
@each_approach
def test_steps_and_equal_layers_are_one_program(approach):
    """Tests that static fields are hashable and compare by value: a new layer is not traced."""

    @filter_jit
    @eqx.debug.assert_max_traces(max_traces=1)
    def step(layer, state, x):
        return over_batch(layer)(x, state)

    for _ in range(2):
        layer, state = make(3, ["batch"], approach=approach)
        for _ in range(3):
            _, state = step(layer, state, X)


MANY = 150


def test_the_type_of_a_memory_is_found_once_for_each_of_many_layers(monkeypatch):
    layers = [make(3, "batch", approach=Batch(1 / (2 + i))) for i in range(MANY)]
    calls, new = [], _memory.new
    monkeypatch.setattr(_memory, "new", lambda *args: calls.append(args) or new(*args))
    for _ in range(2):
        for layer, state in layers:
            _memory.recall(layer, state)
    assert len(calls) == MANY


@contextlib.contextmanager
def programs() -> Iterator[list[str]]:
    """Returns a list of the programs that XLA has compiled meanwhile."""
    compiled = []

    def listen(event: str, duration_secs: float, **others: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(str(others.get("fun_name")))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.long  # compiles each of them
@pytest.mark.x32
def test_many_operations_without_jit_compile_once():
    unit = Moments.of(jnp.zeros(3), 1.0)

    def normalise_all():
        for i in range(MANY):
            normalise(X, unit, axis=0, eps=0.5 + i)

    with programs() as first:
        normalise_all()
    with programs() as second:
        normalise_all()
    assert len(first) >= MANY
    assert second == []


# Each has a shape of its own, because JAX keeps what it has compiled.
@pytest.mark.parametrize(("channels", "name"), [*enumerate(STRATEGIES, 1000)])
def test_a_new_batch_norm_compiles_nothing(channels, name):
    """Fails if the memory is made op by op: a model has many numbers of channels, and XLA
    would compile each operation for each number."""
    with programs() as compiled:
        make(channels, "batch", approach=STRATEGIES[name](0.99))
    assert compiled == []


@pytest.mark.parametrize(("third", "name"), [*enumerate(NAMES, 400)])
def test_a_new_layer_compiles_nothing(third, name):
    with programs() as compiled:
        made(name, (3 * third, 1))
    assert compiled == []


@pytest.mark.x32
def test_derivatives_of_a_layer_without_jit():
    """Fails if a primitive that is evaluated by a compiled program calls itself for ever."""
    derive = jax.grad(lambda x: jnp.sin(layer_norm(jax.nn.relu)(x)).sum())
    with jax.disable_jit():
        outputs = derive(X)
    np.testing.assert_allclose(outputs, derive(X), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["BatchNorm", "LayerNorm"])
def test_debug_nans_names_the_pass(name):
    """Fails if a pass, which JAX runs again without jit, calls its compiled program again."""
    layer, call = made(name, (3,))

    def loss(x):
        return call(layer, x)[0].sum()

    for function in (loss, jax.jit(loss), jax.grad(loss), jax.jit(jax.grad(loss))):
        with jax.debug_nans(True), pytest.raises(FloatingPointError, match="in eqx_norm_"):
            function(X.at[0, 0].set(jnp.inf))
