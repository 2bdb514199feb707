"""Tests that recalibrated statistics are those of all data, and nothing else changes."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm import BatchNorm
from eqx_norm.models import _pooled, _recalibrate, freeze, recalibrate
from eqx_norm.models._layers import entries
from eqx_norm.strategies import Moments
from tests.helpers import (
    each_approach,
    example,
    f32,
    make,
    quick_call,
    remembered,
    same,
)
from tests.models.pooling import SIZES, STEP, convolved, cut, data, network, of_all


@pytest.fixture(autouse=True)
def _quick(request, monkeypatch):
    if "exact" not in request.node.name:
        monkeypatch.setattr(_recalibrate, "_step", STEP)


@pytest.fixture(scope="module")
def deep():
    return eqx.nn.make_with_state(network)(jax.random.key(0))


@each_approach
@pytest.mark.parametrize("unbiased", [False, True])
def test_one_layer_remembers_exactly_all_values_together(approach, unbiased):
    layer, state = make(3, "batch", approach=approach, unbiased=unbiased)
    x = data(3, 4)
    kept = entries(state)
    after = recalibrate(layer, state, cut(x))
    n, mean, m2 = of_all(x)
    ours, variance = remembered(layer, after)
    np.testing.assert_allclose(ours, mean, rtol=1e-6)
    np.testing.assert_allclose(variance, m2 / (n - unbiased), rtol=1e-6)
    assert after.get(layer.memory_index).weight == 1
    # The mean is held to twice the precision.
    memory = after.get(layer.memory_index)
    both = np.asarray(memory.mean, float) + np.asarray(memory.mean_rest, float)
    np.testing.assert_allclose(both, mean, rtol=1e-8)
    assert after.get(layer.accepted_index) == len(SIZES)
    assert after.get(layer.rejected_index) == 0
    assert same(entries(state), kept)  # the state given stays valid, and as it was


def test_many_batches_are_as_exact_as_one():
    layer, state = make(2, "batch", approach="batch")
    x = data(2, 4, n=210)
    after = recalibrate(layer, state, cut(x, [4, 3] * 30) * 3)
    n, mean, m2 = of_all(x)
    np.testing.assert_allclose(remembered(layer, after)[0], mean, rtol=2e-7)
    np.testing.assert_allclose(remembered(layer, after)[1], m2 / n, rtol=1e-6)


def test_moments_are_added_up_in_float64():
    """In float32 2^24 + 1 is 2^24, and the batches after that would not count."""
    many = Moments(f32(2.0**24), f32([0]), f32([2.0**24]))
    one = Moments(f32(1), f32([0]), f32([1]))
    pooled = _pooled.wide([many])
    for _ in range(40):
        pooled = _pooled.merged(pooled, [one])
    assert np.asarray(pooled[0].count) == np.asarray(pooled[0].m2)[0] == 2**24 + 40


@pytest.mark.parametrize("inference", [False, True])
def test_a_deep_network_normalises_by_each_batch(deep, inference):
    """The second norm's statistics are those of what training gives it, cut as it is cut."""
    model, state = deep
    batches = cut(data(3, 4, mean=1, std=2))
    seen = [[], []]
    for x in map(np.float64, batches):
        y = convolved(model.layers[0], x)
        seen[0].append(y)
        _, mean, m2 = of_all(y)
        variance = m2 / (y.size / 3)
        y = (y - mean[:, None]) / np.sqrt(variance + 1e-5)[:, None]
        seen[1].append(convolved(model.layers[2], y))
    after = recalibrate(eqx.nn.inference_mode(model, inference), state, batches)
    for layer, values in zip(model.layers[1::2], seen, strict=True):
        n, mean, m2 = of_all(np.concatenate(values))
        ours, variance = remembered(layer, after)
        np.testing.assert_allclose(variance, m2 / n, rtol=1e-5)
        np.testing.assert_allclose(ours, mean, atol=1e-5 * np.sqrt(m2 / n).max())


def test_a_state_that_has_learnt_forgets_it(deep):
    model, state = deep
    x = jnp.asarray(data(3, 4))
    _, learnt = quick_call(model, state, 7 * x - 30)
    once, again = recalibrate(model, state, [x]), recalibrate(model, learnt, [x])
    for i in (1, 3):
        index = model.layers[i].memory_index
        assert same(once.get(index), again.get(index))
        assert again.get(model.layers[i].accepted_index) == 2


def test_frozen_norms_other_state_and_parameters_stay(deep):
    class Counter(eqx.nn.StatefulLayer):
        index: eqx.nn.StateIndex

        def __init__(self):
            self.index = eqx.nn.StateIndex(jnp.zeros((), int))

        def __call__(self, x, state, *, key=None):
            return x, state.set(self.index, state.get(self.index) + 1)

    def build(key):
        inner = network(key)
        return eqx.nn.Sequential([Counter(), *inner.layers])

    model, state = eqx.nn.make_with_state(build)(jax.random.key(0))
    frozen = freeze(model, lambda path, layer: path == "layers[2]")
    after = recalibrate(frozen, state, cut(data(3, 4)))
    assert jax.tree.structure(after) == jax.tree.structure(state)
    changed = {
        marker
        for marker, held in entries(state).items()
        if not same(held, entries(after)[marker])
    }
    norm = model.layers[4]
    assert changed == {norm.memory_index.marker, norm.accepted_index.marker}


def test_a_batch_that_is_not_finite_is_left_out_and_counted(deep):
    model, state = deep
    batches = cut(data(3, 4))
    bad = np.where(np.arange(12).reshape(3, 4) == 5, np.nan, batches[1])
    with pytest.warns(UserWarning, match=r"Of 4 batches: layers\[1\] left out 1.*\[3\] left"):
        after = recalibrate(model, state, [*batches, bad])
    expected = recalibrate(model, state, batches)
    for i in (1, 3):
        layer = model.layers[i]
        assert same(after.get(layer.memory_index), expected.get(layer.memory_index))
        assert after.get(layer.rejected_index) == 1
    with pytest.raises(ValueError, match=r"Nothing was learnt of 1 batches: layers\[1\] was"):
        recalibrate(model, state, [bad])


def test_norms_that_share_a_memory_pool_into_one(deep):
    model, state = deep
    shared = ("memory_index", "accepted_index", "rejected_index")
    indices = [getattr(model.layers[1], name) for name in shared]
    model = eqx.tree_at(lambda m: [getattr(m.layers[3], n) for n in shared], model, indices)
    x = data(3, 4, mean=1, std=1)
    after = recalibrate(model, state, [x])
    y = convolved(model.layers[0], x)
    n, mean, m2 = of_all(y)
    z = (y - mean[:, None]) / np.sqrt(m2 / n + 1e-5)[:, None]
    _, mean, m2 = of_all(np.concatenate([y, convolved(model.layers[2], z)]))
    np.testing.assert_allclose(remembered(model.layers[1], after)[0], mean, rtol=1e-5)
    np.testing.assert_allclose(remembered(model.layers[1], after)[1], m2 / (2 * n), rtol=1e-5)


@pytest.mark.x32  # a dtype of its own
def test_complex_values():
    layer, state = make(2, "batch", approach="batch", dtype=jnp.complex64)
    x = data(2, 4) + 1j * data(2, 4)[::-1]
    after = recalibrate(layer, state, cut(x.astype(np.complex64)))
    wide = np.moveaxis(x.astype(np.complex128), 1, 0).reshape(2, -1)
    np.testing.assert_allclose(remembered(layer, after)[0], wide.mean(1), rtol=1e-6)
    np.testing.assert_allclose(remembered(layer, after)[1], wide.var(1), rtol=1e-6)
    assert after.get(layer.memory_index).mean.dtype == np.complex64


def test_example():
    names = example(recalibrate)
    layer, state = names["model"].layers[1], names["state"]
    y = jax.vmap(names["model"].layers[0])(names["images"])
    np.testing.assert_allclose(remembered(layer, state)[0], of_all(y)[1], atol=1e-6)


@pytest.mark.peers
def test_like_pytorch_s_update_bn_where_both_agree(deep):
    """On one batch they are the same. Over several of one size and mean, both means are, and
    the variances are but for n - 1 taken from each batch, and not from all of them once."""
    torch = pytest.importorskip("torch")

    def build(key):
        norms = [BatchNorm(3, "batch", approach="batch", unbiased=True) for _ in range(2)]
        return network(key, *norms)

    model, state = eqx.nn.make_with_state(build)(jax.random.key(0))
    theirs = torch.nn.Sequential()
    for layer in model.layers:
        if isinstance(layer, BatchNorm):
            theirs.append(torch.nn.BatchNorm1d(3))
        else:
            conv = torch.nn.Conv1d(3, 3, 1)
            with torch.no_grad():
                conv.weight.copy_(torch.tensor(np.array(layer.weight)))
                conv.bias.copy_(torch.tensor(np.array(layer.bias[:, 0])))
            theirs.append(conv)

    def update(batches):
        loader = [torch.tensor(batch) for batch in batches]
        torch.optim.swa_utils.update_bn(loader, theirs)
        return [(theirs[i].running_mean.numpy(), theirs[i].running_var.numpy()) for i in (1, 3)]

    x = data(3, 4, mean=1, std=2)
    after = recalibrate(model, state, [x])
    for i, (mean, variance) in zip((1, 3), update([x]), strict=True):
        np.testing.assert_allclose(remembered(model.layers[i], after)[0], mean, atol=1e-5)
        np.testing.assert_allclose(remembered(model.layers[i], after)[1], variance, rtol=1e-5)

    batches = [batch - batch.mean((0, 2), keepdims=True) for batch in np.split(x, 4)]
    after = recalibrate(model, state, batches)
    k, n = 4, 10 * 4
    (mean, variance), _ = update(batches)
    np.testing.assert_allclose(remembered(model.layers[1], after)[0], mean, atol=1e-5)
    pooled = variance * k * (n - 1) / (k * n - 1)
    np.testing.assert_allclose(remembered(model.layers[1], after)[1], pooled, rtol=1e-5)
