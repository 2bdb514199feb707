"""Tests that recalibrated statistics are those of all data, and that nothing else changes."""

import textwrap
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm import BatchNorm
from eqx_norm.models import freeze, recalibrate
from eqx_norm.models._layers import entries
from eqx_norm.strategies import Accumulated, Average, VarianceClip
from tests.documents import run
from tests.helpers import copy, make, over_batch, quick_call, remembered, same
from tests.models.nested import OURS, donatable, forward, made, norm

UNOPTIMISED = True  # compares values: tests/compiling.py

SIZES = (16, 8, 16)
CASES = [(VarianceClip(Average()), False), (Accumulated(Average(), 2), True)]


def data(mean=100.0, std=3.0, n=40):
    """Returns examples whose mean and spread differ along the batch and between channels."""
    x = mean + std * np.random.RandomState(0).standard_normal((n, 3, 4))
    drift, channel = np.linspace(0, 5, n)[:, None, None], np.arange(1, 4)[:, None]
    return np.asarray(channel * (x + drift), jnp.result_type(float))


def cut(x):
    return np.split(x, np.cumsum(SIZES)[:-1])


def check(layer, state, x, unbiased=False, rtol=1e-6):
    """Compares a layer's statistics with mean and variance of all values, in float64."""
    x = np.asarray(x, np.float64).swapaxes(0, 1).reshape(3, -1)
    mean, variance = remembered(layer, state)
    np.testing.assert_allclose(mean, x.mean(1), rtol=rtol, atol=rtol * x.std())
    np.testing.assert_allclose(variance, x.var(1, ddof=int(unbiased)), rtol=rtol)


def network(approach: Any = "batch") -> Any:
    norms = [BatchNorm(3, "batch", approach=a) for a in ("batch", approach)]
    return eqx.nn.Sequential([eqx.nn.Identity(), norms[0], eqx.nn.Lambda(jnp.square), norms[1]])


@pytest.fixture
def deep():
    return eqx.nn.make_with_state(network)()


@pytest.mark.parametrize(("approach", "unbiased"), CASES, ids=str)
def test_recalibrated_statistics_are_those_of_all_values_together(approach, unbiased):
    layer, state = make(3, "batch", approach=approach, unbiased=unbiased)
    x = data()
    for _ in range(2):  # earlier statistics do not matter
        _, state = quick_call(layer, state, 7 * x - 30)
    values = entries(state)
    after = recalibrate(layer, state, cut(x))
    check(layer, after, x, unbiased)
    assert donatable((layer, after))
    before = 1 if isinstance(approach, Accumulated) else 2  # of two micro-batches
    assert after.get(layer.memory_index).accepted == before + len(SIZES)
    assert after.get(layer.memory_index).rejected == 0
    assert same(entries(state), values)  # the old state stays valid


@pytest.mark.filterwarnings("ignore:.* hold one value per channel")
def test_recalibrate_on_batches_of_one_value_with_unbiased_variance():
    settings: Any = {"unbiased": True, "memory_axis_name": "devices"}  # not bound here
    layer, state = make(3, "batch", approach="batch", **settings)
    x = data(n=12)[..., 0]
    check(layer, recalibrate(layer, state, list(x[:, None])), x, unbiased=True)


def test_recalibrate_normalises_a_deep_network_by_each_batch(deep):
    """Checks that the second norm's statistics are those of its inputs in training."""
    model, state = deep
    batches, seen = cut(data(mean=1, std=2)), []
    for x in map(np.float64, batches):
        y = (x - x.mean((0, 2), keepdims=True)) / np.sqrt(x.var((0, 2), keepdims=True) + 1e-5)
        seen.append(y**2)
    after = recalibrate(eqx.nn.inference_mode(model), state, batches)
    check(model.layers[3], after, np.concatenate(seen), rtol=1e-5)


def test_recalibrate_keeps_frozen_norms_and_other_state():
    def build(nn, key):
        linear = eqx.nn.SpectralNorm(eqx.nn.Linear(3, 3, key=key), "weight", key=key)
        return [linear, norm(nn), norm(nn)]

    model, state = made(build, OURS)
    frozen = freeze(model, lambda path, layer: path == "[2]")
    after = recalibrate(frozen, state, [x[..., 0] for x in cut(data())], forward)
    before, now = entries(state), entries(after)
    changed = {marker for marker in before if not same(before[marker], now[marker])}
    assert changed == {model[1].memory_index.marker}


def test_recalibrate_leaves_out_and_counts_a_non_finite_batch(deep):
    model, state = deep
    batches = cut(data())
    bad = np.where(np.arange(12).reshape(3, 4) == 5, np.nan, batches[1])
    with pytest.warns(UserWarning, match=r"Of 4 batches: layers\[1\] skipped 1.*\[3\] skipped"):
        after = recalibrate(model, state, [*batches, bad])
    expected = recalibrate(model, state, batches)
    for layer in model.layers[1::2]:
        assert same(*(s.get(layer.memory_index).statistics for s in (after, expected)))
        assert after.get(layer.memory_index).rejected == 1


def test_recalibrate_keeps_the_memory_of_a_norm_that_is_not_called(deep):
    model, state = deep
    _, state = quick_call(model, copy(state), jnp.asarray(data()))

    def first_only(model, state, batch):
        return over_batch(model.layers[1])(batch["image"], state)[1]  # the state alone

    with pytest.warns(UserWarning, match=r"layers\[3\] got no .* keeps its statistics"):
        after = recalibrate(model, state, [{"image": b} for b in cut(data())], first_only)
    check(model.layers[1], after, data())
    index = model.layers[3].memory_index
    assert same(after.get(index), state.get(index))


def test_recalibrate_an_ensemble(tmp_path):
    models, states = made(norm, OURS, members=2)
    batches = np.asarray(data(n=48)[..., 0].reshape(3, 2, 8, 3))
    with pytest.raises(ValueError, match="The model is an ensemble") as raised:
        recalibrate(models, states, list(batches[:, 0]))
    code = textwrap.dedent(
        str(raised.value).partition("If all see all:\n")[2].partition("\nOr")[0]
    )
    names = {"eqx": eqx, "jax": jax, "recalibrate": recalibrate, "models": models}
    names = run(code, tmp_path, **names, states=states, batches=list(batches[:, 0]))
    expected = batches[:, [0, 0]].mean((0, 2)), batches[:, [0, 0]].var((0, 2))
    np.testing.assert_allclose(remembered(models, names["states"]), expected, rtol=1e-5)
    after = recalibrate(models, states, list(batches), forward)
    expected = batches.mean((0, 2)), batches.var((0, 2))
    np.testing.assert_allclose(remembered(models, after), expected, rtol=1e-5)


def test_recalibrate_a_model_that_maps_over_stacked_norms():
    norms, state = made(norm, OURS, members=2)
    axes = eqx.if_array(0), None, eqx.if_array(0)
    model = eqx.Partial(eqx.filter_vmap(lambda n, x, s: n(x, s), in_axes=axes), norms)
    after = recalibrate(model, state, cut(data()[..., 0]))
    assert after.get(norms.memory_index).accepted.tolist() == [len(SIZES)] * 2


class Batches:
    """Stands for a data set that is indexed, without `__iter__`."""

    def __getitem__(self, i):
        return cut(data())[i]


class Tensor(Batches):
    """Stands for an array of another package, which iterates over its first axis."""

    shape = (3, 16, 3, 4)

    def __array__(self, dtype=None, copy=None):
        return np.ones(self.shape)


def test_recalibrate_reads_an_indexed_data_set_and_refuses_arrays_of_other_packages(
    deep, unchecked
):
    model, state = deep
    data_set: Any = Batches()
    after = recalibrate(model, state, data_set)
    assert same(after, recalibrate(model, state, cut(data())))
    tensor: Any = Tensor()
    with pytest.raises(ValueError, match=r"^batches is an array of shape \(3, 16, 3, 4\); "):
        recalibrate(model, state, tensor)


def test_recalibrate_accepts_keys():
    draw = eqx.nn.Lambda(lambda key: jax.random.normal(key, (3, 4)))
    norm = BatchNorm(3, "batch", approach="batch")
    model, state = eqx.nn.make_with_state(lambda: eqx.nn.Sequential([draw, norm]))()
    keys = jax.random.split(jax.random.key(0), 8)
    after = recalibrate(model, state, [keys])
    check(model.layers[1], after, jax.vmap(draw)(keys), rtol=1e-5)


def test_recalibrate_accepts_a_generator_of_tuples(deep):
    model, state = deep
    tuples = ((x, "label") for x in cut(data()))
    after = recalibrate(model, state, tuples)
    assert same(after, recalibrate(model, state, cut(data())))
