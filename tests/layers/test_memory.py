"""Tests that running statistics are right from the first step on, and updated once per call.

tests/strategies/test_recursions.py tests them over many steps.
"""

import functools

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

from eqx_norm.strategies import (
    Accumulated,
    Adam,
    Average,
    Batch,
    Cumulative,
    Frozen,
    Renorm,
)
from tests.compiling import jit
from tests.helpers import (
    APPROACHES,
    bits,
    call,
    call_and_grad,
    copy,
    each_approach,
    make,
    member,
    normal,
    over_batch,
    quick_call,
    quick_call_and_grad,
    remember,
    remembered,
    same,
)
from tests.helpers import Cumulative as Unloaded

X = normal(0, (8, 3, 4), 1, 2)
LONG = pytest.mark.long


@each_approach
@pytest.mark.parametrize("unbiased", [False, True])
def test_inference_is_right_from_the_first_step_and_changes_nothing(approach, unbiased):
    """Tests both values of `unbiased`; MXNet #21111 asks for a visible choice of variance."""
    layer, state = make(3, "batch", approach=approach, unbiased=unbiased)
    inference = eqx.nn.inference_mode(layer)
    identity, after = quick_call(inference, copy(state), X)
    assert same(after, state)
    np.testing.assert_allclose(identity, X, rtol=1e-5)
    # `inference=` takes priority over `layer.inference`.
    y, state = quick_call(functools.partial(inference, inference=False), state, X)
    values = np.asarray(X, np.float64).swapaxes(0, 1).reshape(3, -1)
    mean, variance = remembered(layer, state)
    np.testing.assert_allclose(mean, values.mean(1), rtol=1e-5)
    np.testing.assert_allclose(variance, values.var(1, ddof=int(unbiased)), rtol=1e-5)
    expected = (np.asarray(X) - mean[:, None]) / np.sqrt(variance[:, None] + 1e-5)
    for mode in (inference, functools.partial(layer, inference=True)):
        inferred, after = quick_call(mode, copy(state), X)
        assert same(after, state)
        np.testing.assert_allclose(inferred, expected, rtol=1e-5, atol=1e-5)
    if approach in ("batch", "renorm", "variance_clip"):
        np.testing.assert_allclose(y.std((0, 2)), np.ones(3), rtol=1e-5)


OFTEN = "batch", "renorm", "variance_clip"
often = [*OFTEN, *(pytest.param(name, marks=LONG) for name in APPROACHES if name not in OFTEN)]


@pytest.mark.parametrize("approach", often)
def test_memory_is_bitwise_equal_with_and_without_a_gradient(approach):
    """Tests the request of MXNet #21111, also without jit, in a checkpoint and in a scan. (From
    the second batch on, compiled programs round once where op-by-op runs round twice.)"""
    layer, state = make(3, "batch", approach=approach)
    _, without = call(layer, copy(state), X)
    _, without_jit = over_batch(layer)(X, copy(state))

    @eqx.filter_jit
    def scan(state, xs):
        def step(state, x):
            _, state, gradients = call_and_grad(eqx.filter_checkpoint(layer), state, x, x)
            return state, gradients

        return jax.lax.scan(step, state, xs)

    with_gradient, _ = scan(copy(state), X[None])
    assert same(without, without_jit)
    assert same(without, with_gradient)


def stacked(count, **options):
    return eqx.filter_vmap(lambda _: make(3, "batch", **options))(jnp.arange(count))


@LONG
@each_approach
def test_scan_over_stacked_layers_equals_a_loop(approach):
    """Tests Equinox #934: each layer of the stack has its own running statistics."""
    layers, states = stacked(3, approach=approach, activation=jax.nn.relu)
    arrays, static = eqx.partition(layers, eqx.is_array)

    def scanned(x, states):
        def step(x, layer):
            arrays, state = layer
            y, state = over_batch(eqx.combine(arrays, static))(x, state)
            return x + y, state

        return jax.lax.scan(step, x, (arrays, states))

    def looped(x, states):
        after = []
        for i in range(3):
            y, state = over_batch(member(layers, i))(x, member(states, i))
            x, after = x + y, [*after, state]
        return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *after)

    def training(forward):
        def loss(x, states):
            y, after = forward(x, states)
            return jnp.sum(y**3), (y, after)

        return jit(jax.value_and_grad(loss, has_aux=True))

    for _ in range(2):
        answer, expected = (training(f)(X, copy(states)) for f in (scanned, looped))
        chex.assert_trees_all_close(answer, expected, rtol=1e-5, atol=1e-5)
        (_, (_, states)), _ = answer
    assert (states.get(layers.memory_index).accepted == 2).all()


def test_running_returns_what_a_layer_and_each_member_of_an_ensemble_infers_by():
    layers, states = stacked(2, approach="adam")
    xs = jnp.stack([X, 2 * X])
    _, states = eqx.filter_vmap(call)(layers, states, xs)
    running = layers.running(states)
    np.testing.assert_allclose(running.mean, xs.mean((1, 3)), rtol=1e-5)
    np.testing.assert_allclose(running.variance, xs.var((1, 3)), rtol=1e-5)
    one, state = member(layers, 1), member(states, 1)
    assert same(one.running(state), jax.tree.map(lambda leaf: leaf[1], running))
    with pytest.raises(ValueError, match="belongs to another layer"):
        make(4, "batch", approach="adam")[0].running(state)


class Scaled(Cumulative):
    """Stands for the user's strategies, which may hold arrays."""

    scale: jax.Array = eqx.field(default_factory=lambda: jnp.asarray(2.0))

    def update(self, batch, memory):
        _, memory = super().update(batch, memory)
        return memory.moments.towards(batch, 0.5 / self.scale), memory


STRATEGIES = ["ema", "renorm", Cumulative(), Scaled()]
OTHERS = ["batch", "adam", "smooth_start", "variance_clip", Average(), Accumulated(Adam(), 1)]
STRATEGIES += [pytest.param(strategy, marks=LONG) for strategy in OTHERS]


@pytest.mark.x32  # sets 64 bits itself
@pytest.mark.parametrize("memory_axis_name", [(), pytest.param("ghost", marks=LONG)])
@pytest.mark.parametrize("approach", STRATEGIES, ids=str)
def test_derivatives_pass_through_the_memory(approach, memory_axis_name):
    """Tests GradAttack #4, pytorch-flows #8, higher #55: derivatives of inference after a step,
    of a second step and of the running statistics, in x and in the memory before."""
    with jax.enable_x64(True):
        momentum = {"momentum": 0.9} if approach in APPROACHES else {}
        options = {"approach": approach, "memory_axis_name": memory_axis_name, **momentum}
        layer, state = make(3, "batch" if memory_axis_name else ("batch", "ghost"), **options)
        x, later, along, weight = np.random.default_rng(0).normal(1, 2, (4, 2, 4, 3, 2))

        def train(x, state, model=layer):
            return over_batch(over_batch(model), "ghost")(x, state)

        state = train(later**2, state)[1]
        memory = state.get(layer.memory_index).statistics

        def results(x, change):
            # Rests of pairs, behind their values, are constants to derivatives.
            moved = jax.tree.map(
                lambda a: a.at[..., 0, :].add(change) if a.ndim > 1 else a, memory
            )
            _, after = train(x, remember(layer, copy(state), moved))
            inferred, _ = train(later, copy(after), eqx.nn.inference_mode(layer))
            running = layer.running(after)
            y, _ = train(later, after)
            sums = [(v**3).sum() for v in (running.mean, running.variance)]
            return jnp.stack([(inferred * weight).sum(), (y * weight).sum(), *sums])

        at, step = (jnp.asarray(x), jnp.zeros(())), 1e-5
        gradient, change = jit(jax.jacrev(results, (0, 1)))(*at)
        _, tangent = jit(lambda *at: jax.jvp(results, at, (along, jnp.ones(()))))(*at)
        found = (gradient * along).sum((1, 2, 3, 4)) + change
        plus, minus = (jit(results)(x + h * along, h) for h in (step, -step))
        expected = (plus - minus) / (2 * step)
        np.testing.assert_allclose(found, tangent, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
        assert (abs(expected[jnp.array([0, 2, 3])]) > 1e-3).all()


def test_second_derivatives_of_the_running_statistics():
    """The first batch is remembered as it is."""
    layer, state = make(3, "batch", approach="batch")

    def of_layer(x):
        return (layer.running(over_batch(layer)(x, state)[1]).variance ** 2).sum()

    def of_formula(x):
        return (x.var((0, 2)) ** 2).sum()

    along = jnp.asarray(normal(1, X.shape))
    found, expected = (
        jit(lambda x, f=f: jax.jvp(jax.grad(f), (x,), (along,))[1])(X)
        for f in (of_layer, of_formula)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_derivative_in_a_value_that_the_users_strategy_reads():
    def mean_after(scale):
        class Own(Unloaded):
            def update(self, batch, memory):
                return batch, batch.towards(memory, 1 - scale)

        layer, state = make(3, "batch", approach=Own())
        return layer.running(over_batch(layer)(X, state)[1]).mean

    for transform in (jax.jacrev, jax.jacfwd):
        found = jit(transform(mean_after))(jnp.asarray(0.25))
        np.testing.assert_allclose(found, X.mean((0, 2)), rtol=1e-5)


def test_a_users_strategy_may_call_the_host():
    means = []

    class Own(Unloaded):
        def update(self, batch, memory):
            io_callback(means.append, None, lax.stop_gradient(batch.mean))
            return batch, memory.merge(batch)

    layer, state = make(3, "batch", approach=Own())

    def loss(x):
        y, after = over_batch(layer)(x, state)
        return (y**3).sum(), after

    _, after = jit(jax.grad(loss, has_aux=True))(X)
    jax.effects_barrier()
    assert means
    np.testing.assert_allclose(means[0], layer.running(after).mean, rtol=1e-6)


@pytest.mark.nans
@pytest.mark.parametrize("approach", [*STRATEGIES, Frozen(Batch())], ids=str)
def test_a_batch_that_is_not_remembered_has_the_derivative_0(approach):
    """Tests NaN, overflow and a batch that is masked out, and a frozen layer."""
    layer, state = make(3, "batch", approach=approach)
    state = quick_call(layer, state, X)[1]

    def inferred(x, memory, mask):
        before = remember(layer, copy(state), memory)
        _, after = over_batch(functools.partial(layer, mask=mask))(x, before)
        return (over_batch(eqx.nn.inference_mode(layer))(X, after)[0] ** 3).sum()

    memory = state.get(layer.memory_index).statistics
    gradient = jit(jax.grad(inferred, (0, 1), allow_int=True))
    for bad, mask in ((np.nan, None), (np.inf, None), (1e30, None), (1, jnp.asarray(False))):
        dx, d_memory = gradient(X.at[3, 1, 2].set(bad), memory, mask)
        np.testing.assert_array_equal(dx, np.zeros(X.shape))
        leaves = [a for a in jax.tree.leaves(d_memory) if a.dtype != jax.dtypes.float0]
        assert all(np.isfinite(leaf).all() for leaf in leaves)
        assert any(leaf.any() for leaf in leaves) == layer.approach.learns


@pytest.mark.nans
@pytest.mark.parametrize("approach", [*APPROACHES, Renorm(r_max=3, d_max=5)], ids=str)
def test_non_finite_batch_is_not_remembered_but_counted(approach):
    """Tests finite values, too, whose squares overflow: y and its derivative are finite."""
    layer, state = make(3, "batch", approach=approach)
    y, state, (_, dx) = quick_call_and_grad(layer, state, X.at[3, 1, 2].set(1e30), X)
    assert np.isfinite([y, dx]).all()
    _, state = quick_call(layer, state, X)
    before = state.get(layer.memory_index)
    for rejected, bad in enumerate((np.nan, np.inf, 1e30), 2):
        y, state, (_, dx) = quick_call_and_grad(layer, state, X.at[3, 1, 2].set(bad), X)
        after = state.get(layer.memory_index)
        assert same(before.statistics, after.statistics)
        assert (after.accepted, after.rejected) == (1, rejected)
    assert np.isfinite([y, dx]).all()
    _, state = quick_call(layer, state, 2 * X)
    after = state.get(layer.memory_index)
    assert (after.accepted, after.rejected) == (2, 4)
    assert not same(before.statistics, after.statistics)


@pytest.mark.parametrize("approach", [*APPROACHES, Accumulated(Cumulative(), 2)], ids=str)
def test_a_memory_that_overflows_is_not_remembered(approach):
    """Tests batches of finite mean and variance, whose difference or its square overflows."""
    layer, state = make(3, "batch", approach=approach)
    for x in (X, *(jnp.full_like(X, value) for value in (1e20, -3e38, 3e38)), X):
        _, state = quick_call(layer, state, x)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))
    held = state.get(layer.memory_index)
    assert held.accepted + held.rejected == 5
    assert held.accepted >= 2


class Windows(Unloaded):
    """Remembers the variances of the last 5 and of the last 2 batches; at first infinities."""

    def init(self, channels, dtype):
        return [jnp.full((size, channels), jnp.inf, dtype) for size in (5, 2)]

    def update(self, batch, memory):
        return batch, [jnp.roll(old, 1, 0).at[0].set(batch.variance) for old in memory]


@pytest.mark.nans
def test_a_memory_may_hold_infinities_and_arrays_of_several_shapes():
    layer, state = make(3, "batch", approach=Windows())
    for x in (X, X.at[0].set(jnp.nan)):
        _, state = quick_call(layer, state, x)
    assert state.get(layer.memory_index).counts.tolist() == [1, 1]


@each_approach
def test_empty_batch_leaves_the_memory_unchanged(approach):
    layer, state = make(3, "batch", approach=approach)
    for x in (jnp.ones((8, 3, 0)), jnp.ones((0, 3))):
        y, after, _ = quick_call_and_grad(layer, copy(state), x, x)
        assert y.shape == x.shape
        assert same(state, after)


@pytest.mark.filterwarnings("ignore:x of shape")
@each_approach
def test_one_value_per_channel_gives_the_bias_and_no_nan(approach):
    """Tests MXNet #21111: the variance of a single value causes no NaN."""
    layer, state = make(3, "batch", approach=approach)
    layer = eqx.tree_at(lambda m: m.bias, layer, jnp.arange(3, dtype=jnp.float32))
    x = normal(0, (1, 3, 1, 1), 100, 10)
    y, state, (_, dx) = quick_call_and_grad(layer, state, x, jnp.ones_like(x))
    assert bits(y) == bits(layer.bias)
    np.testing.assert_array_equal(dx, np.zeros(x.shape))
    mean, variance = remembered(layer, state)
    np.testing.assert_allclose(mean, x.reshape(3), rtol=1e-6)
    np.testing.assert_array_equal(variance, np.zeros(3))
    assert np.isfinite(quick_call(eqx.nn.inference_mode(layer), state, x)[0]).all()
