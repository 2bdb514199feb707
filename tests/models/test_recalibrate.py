"""Tests that recalibrated statistics are those of all data, and nothing else changes."""

import importlib
import inspect
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm import BatchNorm
from eqx_norm.models import _recalibrate, freeze, recalibrate, reconfigure
from eqx_norm.models._layers import entries
from eqx_norm.strategies import Accumulated, Average, VarianceClip
from tests.compiling import filter_jit
from tests.helpers import Cumulative as Unloaded
from tests.helpers import example, make, member, over_batch, quick_call, remembered, same
from tests.models.nested import KEY, Counter, unchecked

SIZES = (16, 8, 16)  # a compilation for each
APPROACHES = [
    "batch",
    "ema",
    "smooth_start",
    VarianceClip(Average()),
    Accumulated(Average(), 2),
]
# Compiled without optimisation, for what is no test of accuracy.
QUICK = filter_jit(inspect.unwrap(_recalibrate._step))


@pytest.fixture(autouse=True)
def _quick(request, monkeypatch):
    if "exact" not in request.node.name:
        monkeypatch.setattr(_recalibrate, "_step", QUICK)


def data(*shape, mean=100.0, std=3.0, n=40):
    """Returns examples whose mean and spread differ along the batch and between channels."""
    x = mean + std * np.random.RandomState(0).standard_normal((n, *shape))
    drift = np.linspace(0, 5, n).reshape(-1, *(1 for _ in shape))
    channel = np.arange(1, shape[0] + 1).reshape(1, -1, *(1 for _ in shape[1:]))
    return np.asarray(channel * (x + drift), jnp.result_type(float))


def cut(x, sizes=SIZES):
    return np.split(x, np.cumsum(sizes)[:-1])


def check(layer, state, x, unbiased=False, rtol=1e-6):
    """Compares what a layer remembers with mean and variance of all values, in float64."""
    x = np.moveaxis(np.asarray(x, np.float64), 1, 0).reshape(x.shape[1], -1)
    mean, variance = remembered(layer, state)
    np.testing.assert_allclose(mean, x.mean(1), rtol=rtol, atol=rtol * x.std())
    np.testing.assert_allclose(variance, x.var(1, ddof=int(unbiased)), rtol=rtol)


def network(key, *norms):
    """Returns two convolutions of one value each, with their norms."""
    first, second = norms or [BatchNorm(3, "batch", approach="batch") for _ in range(2)]
    convs = [eqx.nn.Conv1d(3, 3, 1, key=k) for k in jax.random.split(key)]
    return eqx.nn.Sequential([convs[0], first, convs[1], second])


@pytest.fixture(scope="module")
def deep():
    return eqx.nn.make_with_state(network)(KEY)


def convolved(conv, x):
    weight, bias = np.asarray(conv.weight, float)[..., 0], np.asarray(conv.bias, float)
    return np.einsum("oi,nix->nox", weight, x) + bias


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("approach", APPROACHES, ids=str)
def test_a_layer_remembers_exactly_all_values_together(approach, unbiased):
    layer, state = make(3, "batch", approach=approach, unbiased=unbiased)
    x = data(3, 4)
    for _ in range(2):  # what was learnt before is forgotten
        _, state = quick_call(layer, state, 7 * x - 30)
    kept = entries(state)
    after = recalibrate(layer, state, cut(x))
    check(layer, after, x, unbiased)
    used = layer.approach.infer(after.get(layer.memory_index))
    both = np.asarray(used.mean, float) + np.asarray(used.mean_rest, float)
    right = np.asarray(x, float).mean((0, 2))
    np.testing.assert_allclose(both, right, rtol=1e-8)  # to twice the precision
    before = 1 if isinstance(approach, Accumulated) else 2  # of two micro-batches
    assert after.get(layer.accepted_index) == before + len(SIZES)
    assert after.get(layer.rejected_index) == 0
    assert same(entries(state), kept)  # the state given stays valid, and as it was


def test_batches_of_one_value_have_an_unbiased_variance_together():
    layer, state = make(3, "batch", approach="batch", unbiased=True)
    x = data(3, n=12)
    check(layer, recalibrate(layer, state, list(x[:, None])), x, unbiased=True)


@pytest.mark.parametrize("inference", [False, True])
def test_a_deep_network_normalises_by_each_batch(deep, inference):
    """The second norm's statistics are those of what training gives it, cut as it is cut."""
    model, state = deep
    batches = cut(data(3, 4, mean=1, std=2))
    seen = [[], []]
    for x in map(np.float64, batches):
        y = convolved(model.layers[0], x)
        seen[0].append(y)
        y = (y - y.mean((0, 2), keepdims=True)) / np.sqrt(y.var((0, 2), keepdims=True) + 1e-5)
        seen[1].append(convolved(model.layers[2], y))
    after = recalibrate(eqx.nn.inference_mode(model, inference), state, batches)
    for layer, values in zip(model.layers[1::2], seen, strict=True):
        check(layer, after, np.concatenate(values), rtol=1e-5)


def test_after_it_the_average_goes_on_from_the_batches_that_it_has_seen():
    """The micro-batches of before count as the batches that they were."""
    x, ends = jnp.asarray(data(3, 4, n=8)), []
    for approach, parts in ((Average(), 2), (Accumulated(Average(), every=2), 4)):
        norm, state = make(3, "batch", approach=approach)
        for batch in jnp.split(x, parts):
            _, state = quick_call(norm, state, batch)
        state = recalibrate(norm, state, [x])
        for batch in jnp.split(3 * x, parts):
            _, state = quick_call(norm, state, batch)
        ends.append(remembered(norm, state)[0])
    np.testing.assert_allclose(*ends, rtol=1e-5)


def test_frozen_norms_other_state_and_weights_stay(deep):
    layers = [Counter(), *network(KEY).layers]
    model, state = eqx.nn.make_with_state(lambda: eqx.nn.Sequential(layers))()
    frozen = freeze(model, lambda path, layer: path == "layers[2]")
    after = recalibrate(frozen, state, cut(data(3, 4)))
    assert jax.tree.structure(after) == jax.tree.structure(state)
    held, now, norm = entries(state), entries(after), model.layers[4]
    changed = {marker for marker in held if not same(held[marker], now[marker])}
    assert changed == {norm.memory_index.marker, norm.accepted_index.marker}


def test_a_batch_that_is_not_finite_is_left_out_and_counted(deep):
    model, state = deep
    batches = cut(data(3, 4))
    bad = np.where(np.arange(12).reshape(3, 4) == 5, np.nan, batches[1])
    with pytest.warns(UserWarning, match=r"Of 4 batches: layers\[1\] left out 1.*\[3\] left"):
        after = recalibrate(model, state, [*batches, bad])
    right = recalibrate(model, state, batches)
    for layer in model.layers[1::2]:
        assert same(*(s.get(layer.memory_index) for s in (after, right)))
        assert after.get(layer.rejected_index) == 1
    with pytest.raises(ValueError, match=r"Nothing was learnt.*batches: layers\[1\] "):
        recalibrate(model, state, [bad])


def test_a_norm_that_is_not_called_keeps_its_memory(deep):
    model, state = deep

    def first_only(model, state, batch):
        return over_batch(model.layers[1])(batch["image"], state)

    words = r"layers\[3\] was .* keeps what it remembered"
    with pytest.warns(UserWarning, match=words):
        after = recalibrate(model, state, [{"image": b} for b in cut(data(3, 4))], first_only)
    check(model.layers[1], after, data(3, 4))
    index = model.layers[3].memory_index
    assert same(after.get(index), state.get(index))


def test_a_forward_of_one_s_own_with_masks_over_two_axes():
    layer, state = make(3, ("batch", "views"), approach="batch")
    x = data(3, 4).reshape(10, 4, 3, 4)
    length = np.arange(40).reshape(10, 4) % 5

    def forward(model, state, batch):
        def call(x, length, state):
            return model(x, state, mask=jnp.arange(4) < length)

        views: Any = jax.vmap(call, (0, 0, None), (0, None), axis_name="views")
        examples = jax.vmap(views, (0, 0, None), (0, None), axis_name="batch")
        return examples(*batch, state)[1]  # the state alone

    batches = [(x[:6], length[:6]), (x[6:], length[6:])]
    after = recalibrate(layer, state, batches, forward)
    counted = (np.arange(4) < length[..., None]).reshape(-1)
    check(layer, after, np.moveaxis(x, 2, 0).reshape(3, -1)[:, counted].T)
    with pytest.raises(ValueError, match="forward=lambda model, state, batch"):
        recalibrate(layer, state, batches)


def test_an_ensemble():
    keys = jax.random.split(KEY, 2)
    models, states = eqx.filter_vmap(eqx.nn.make_with_state(network))(keys)
    batches = cut(data(3, 4))

    def forward(models, states, x):
        return eqx.filter_vmap(lambda model, state: over_batch(model)(x, state))(models, states)

    after = recalibrate(models, states, batches, forward)
    assert jax.tree.structure(after) == jax.tree.structure(states)
    for i in range(2):
        alone = recalibrate(member(models, i), member(states, i), batches)
        for ours, theirs in zip(*map(jax.tree.leaves, (member(after, i), alone)), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_batches_may_be_tuples_lists_and_a_generator(deep):
    model, state = deep
    images, tuples = data(3, 4), ((x, "label") for x in cut(data(3, 4)))
    right = recalibrate(model, state, cut(images))
    assert same(recalibrate(model, state, tuples), right)
    assert same(recalibrate(model, state, [[x.tolist()] for x in cut(images)]), right)
    names = {"recalibrate": recalibrate, "model": model, "state": state, "tqdm": iter}
    assert same(example(recalibrate, **names, batches=cut(images))["state"], right)


LINEAR = eqx.nn.Linear(3, 3, key=KEY)
# What is given instead, and the error.
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"batches": []}, "^batches is empty"),
    ({"batches": [{"x": 1}]}, "yields a dict.*forward=lambda model, state, batch"),
    ({"batches": [3.0]}, "yields a float, which is neither an array nor a tuple"),
    ({"batches": data(3, 4)}, r"batch of shape \(3, 4\).* example of shape \(4,\)"),
    ({"forward": lambda model, state, x: x}, "returned .*, but has to return the new state"),
    ({"model": LINEAR}, "nothing to recalibrate: .*no eqx_norm.BatchNorm that is not frozen"),
    ({"state": make(3, "batch", approach="batch")[1]}, r"^layers\[1\]: .*for another model"),
]


@pytest.mark.parametrize(("given", "error"), WRONG, ids=[error for _, error in WRONG])
def test_errors(deep, given, error):
    arguments = {"model": deep[0], "state": deep[1], "batches": cut(data(3, 4))} | given
    before = jax.tree.leaves(deep[1])
    with unchecked(), pytest.raises(ValueError, match=error):
        recalibrate(**arguments)
    assert same(jax.tree.leaves(deep[1]), before)


@pytest.mark.parametrize("approach", [Unloaded(), VarianceClip(Unloaded())], ids=str)
def test_a_strategy_that_cannot_load_is_an_error_before_any_data_is_read(approach):
    norms = [BatchNorm(3, "batch", approach=a) for a in ("batch", approach)]
    model, state = eqx.nn.make_with_state(network)(KEY, *norms)
    batches = iter(cut(data(3, 4)))
    with pytest.raises(ValueError, match=r"^layers\[3\]: Cumulative cannot take over"):
        recalibrate(model, state, batches)
    assert len(list(batches)) == len(SIZES)


@pytest.mark.peers
def test_like_pytorch_s_update_bn_where_both_agree(deep):
    """On one batch they are the same. Over several of one size and mean, both means are, and
    the variances are but for n - 1 taken from each batch, and not from all of them once."""
    torch = importlib.import_module("torch")
    model, state = reconfigure(*deep, unbiased=True)
    theirs = torch.nn.Sequential()
    for conv in model.layers[::2]:
        theirs.append(torch.nn.Conv1d(3, 3, 1)).append(torch.nn.BatchNorm1d(3))
        for ours, other in (
            (conv.weight, theirs[-2].weight),
            (conv.bias[:, 0], theirs[-2].bias),
        ):
            other.data.copy_(torch.tensor(np.array(ours)))

    x = data(3, 4, mean=1, std=2)
    centred = [batch - batch.mean((0, 2), keepdims=True) for batch in np.split(x, 4)]
    for batches, factor, norms in (([x], 1, (1, 3)), (centred, 4 * 39 / (4 * 40 - 1), (1,))):
        after = recalibrate(model, state, batches)
        loader = [torch.tensor(batch) for batch in batches]
        torch.optim.swa_utils.update_bn(loader, theirs)
        for i in norms:
            mean, variance = remembered(model.layers[i], after)
            np.testing.assert_allclose(mean, theirs[i].running_mean.numpy(), atol=1e-5)
            right = factor * theirs[i].running_var.numpy()
            np.testing.assert_allclose(variance, right, rtol=1e-5)
