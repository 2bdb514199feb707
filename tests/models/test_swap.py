"""Tests that a swapped model equals a model built with the other layers."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_norm
from eqx_norm.models import FoldedBatchNorm, reconfigure, swap, unswap
from eqx_norm.models._layers import entries, layers_of
from eqx_norm.strategies import Accumulated, Batch, SmoothStart
from tests.documents import run
from tests.helpers import f32, normal, remembered, same
from tests.layers.norms import moved
from tests.models.nested import KEY, OURS, THEIRS, C, call, donatable, made, norm, shapes

UNOPTIMISED = True  # compares values: tests/compiling.py

NORMS = (eqx.nn.BatchNorm, eqx.nn.LayerNorm, eqx.nn.GroupNorm, eqx.nn.RMSNorm)
ULP = float(np.finfo(np.float32).eps)


def network(nn, key):
    """Returns a nested model with the norms of `nn`, one of which is used twice."""
    keys = jax.random.split(key)
    twice = nn.BatchNorm(C, "batch", mode="ema", momentum=0.5)
    return {
        "stem": [eqx.nn.Linear(C, C, key=keys[0]), nn.BatchNorm(C, "batch", mode="batch")],
        "body": (
            eqx.nn.SpectralNorm(eqx.nn.Linear(C, C, key=key), "weight", key=key),
            eqx.nn.Shared([twice, twice], lambda both: both[1], lambda both: both[0]),
            [nn.GroupNorm(1, C), nn.LayerNorm(C, use_bias=False)],
        ),
        "last": nn.BatchNorm(C, "batch", 1e-3, False, 0.9, inference=True, mode="batch"),
        "head": [nn.RMSNorm(C, use_weight=False), eqx.nn.Linear(C, C, key=keys[1])],
    }


@pytest.mark.parametrize(("build", "members", "steps"), [(network, 0, 1), (norm, 2, 40)])
def test_swapped_model_equals_the_model_built_with_these_layers(build, members, steps):
    """Swaps after `steps` batches, and recovers their average mean and variance."""
    model, state = made(build, THEIRS, members=members)
    norms, averages = layers_of(model, NORMS), {}
    for path, layer in norms.items():
        if getattr(layer, "mode", "ema") == "batch":
            random = np.random.RandomState(len(path))
            averages[path] = random.uniform(0.1, 10, (2, *(members, C)[not members :]))
            start = float(np.float32(layer.momentum)) ** steps
            mean, variance = (1 - start) * averages[path]
            count = jnp.full_like(state.get(layer.batch_counter), steps)
            state = state.set(layer.batch_counter, count)
            state = state.set(layer.batch_state_index, (f32(mean), f32(variance + start)))
    new, new_state = swap(model, state)
    assert shapes((new, new_state)) == shapes(made(build, OURS, members=members))
    back = unswap(new, new_state)
    assert shapes(back) == shapes((model, state))
    assert donatable((new, new_state))
    assert donatable(back)
    swapped = layers_of(new, NORMS)
    for path, layer in swapped.items():
        assert (layer.weight is norms[path].weight) & (layer.bias is norms[path].bias)
    before, after = entries(state), entries(new_state)
    assert all(after[marker] is before[marker] for marker in {*before} & {*after})
    for path, expected in averages.items():
        layer, memory = swapped[path], new_state.get(swapped[path].memory_index)
        weight = 1 - layer.momentum**steps
        # The remembered averages are rounded, and divided by the weight.
        tolerance = 20 * ULP / weight
        statistics = remembered(layer, new_state)
        np.testing.assert_allclose(statistics, expected, rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(memory.statistics.weight(layer.momentum), weight, rtol=1e-6)
        assert (np.asarray(memory.accepted) == steps).all()


@pytest.mark.parametrize("mode", ["batch", "ema"])
def test_swap_takes_statistics_without_a_count_unchanged(mode):
    """Covers PyTorch's statistics, which have no count of batches."""
    theirs, state = made(norm, THEIRS, mode)
    put = f32([1, 2, 3]), f32([4, 5, 6])
    state = state.set(theirs.batch_state_index or theirs.ema_state_index, put)
    ours, after = swap(theirs, state)
    assert same(remembered(ours, after), put)
    assert after.get(ours.memory_index).statistics.weight(0.99) == 1


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.complex64])
def test_swap_keeps_dtypes(dtype):
    settings: Any = {"mode": "batch", "dtype": dtype}
    make: Any = eqx.nn.make_with_state
    theirs, state = make(eqx.nn.BatchNorm)(C, "batch", **settings)
    expected = make(eqx_norm.BatchNorm)(C, "batch", **settings)
    assert shapes(swap(theirs, state)) == shapes(expected)
    state = state.set(theirs.batch_counter, jnp.full_like(state.get(theirs.batch_counter), 8))
    _, variance = remembered(*swap(theirs, state))
    assert (np.asarray(variance) >= 0).all()  # also with a rounded momentum


def test_swapped_layers_still_share_a_state():
    first, other = norm(THEIRS), norm(THEIRS)
    model = [first, [first, other]]
    state, model = eqx.nn.State(model), eqx.nn.delete_init_state(model)
    new, new_state = swap(model, state)
    indices = [layer.memory_index.marker for layer in (new[0], *new[1])]
    assert indices[0] == indices[1] != indices[2]
    assert new[0].weight is new[1][0].weight
    assert (len(entries(new_state)), len(entries(unswap(new, new_state)[1]))) == (2, 4)


def test_swapped_part_of_a_model_keeps_the_markers_of_the_model():
    model, state = made(network, THEIRS)
    part, _ = swap(model["last"], state)
    assert part.memory_index.marker == "dict['last'].memory_index"
    ema, ema_state = swap(model, state, where=lambda path, n: getattr(n, "mode", "") == "ema")
    assert (ema["last"], len(layers_of(ema, eqx_norm.BatchNorm))) == (model["last"], 1)
    assert shapes(swap(ema, ema_state)) == shapes(swap(model, state))


def test_swap_overrides_settings_of_all_swapped_layers():
    theirs = made(lambda nn, key: [norm(nn), nn.LayerNorm(C)], THEIRS)
    new, state = swap(*theirs, "smooth_start", eps=1e-3, unbiased=True, activation=jax.nn.relu)
    assert (new[0].approach, new[0].unbiased) == (SmoothStart(0.9), True)
    assert [(layer.eps, layer.activation(-1.0)) for layer in new] == [(1e-3, 0)] * 2
    assert eqx.tree_equal(swap(new, state, "batch", eps=0.1), (new, state))  # already swapped
    assert swap(*theirs, momentum=0.7)[0][0].approach == Batch(0.7)
    back = unswap(*swap(*theirs, "adam"), "ema")[0][0]  # the mode that Adam lacks
    assert (back.mode, back.momentum) == ("ema", 0.9)
    traced = eqx.filter_eval_shape(lambda m, s: swap(m, s, "ema"), *theirs)  # inside of jit
    assert jax.tree.structure(traced[1]) == jax.tree.structure(swap(*theirs, "ema")[1])
    traced = eqx.filter_eval_shape(lambda m, s: unswap(*swap(m, s, "ema", eps=0.1)), *theirs)
    assert traced[0][0].mode == "ema"


@pytest.mark.parametrize(("mode", "steps"), [("batch", 0), ("batch", 5), ("ema", 5)])
def test_swap_after_unswap_restores_the_layer(mode, steps):
    ours, state = made(norm, OURS, mode)
    for step in range(steps):
        _, state = call(ours, state, normal(step, (16, C), 3, 2))
    wrapped, pending = reconfigure(ours, state, approach=lambda s: Accumulated(s, every=2))
    theirs, their_state = unswap(ours, state)
    _, pending = call(wrapped, pending, normal(9, (16, C)))  # pending, not swapped
    assert eqx.tree_equal((theirs, their_state), unswap(wrapped, pending))
    again = swap(theirs, their_state)
    assert shapes(again) == shapes((ours, state))
    np.testing.assert_allclose(remembered(*again), remembered(ours, state), rtol=2 * ULP)
    if steps:
        x, models = normal(9, (16, C), 3, 2), ((theirs, their_state), (ours, state))
        for inference in (True, False):  # training continues with both layers
            y = [call(eqx.nn.inference_mode(n, inference), s, x)[0] for n, s in models]
            np.testing.assert_allclose(*y, atol=4e-6)
        # Equinox's layer cannot store the weight of few batches, so later batches weigh less.
        assert again[1].get(ours.memory_index).statistics.weight(0.9) == 1


def test_changed_weight_offset_keeps_outputs_and_is_undone():
    def build(nn, key):
        norms = nn.LayerNorm(C, use_bias=False), nn.GroupNorm(1, C), nn.RMSNorm(C)
        return [norm(nn), eqx.nn.Linear(C, C, key=key), *norms]

    theirs, state = made(build, THEIRS, members=2)
    theirs, x = moved(theirs), normal(0, (2, 8, C))
    zero = swap(theirs, state, weight_offset=1.0)
    one = reconfigure(*zero, weight_offset=0.0)
    assert {layer.weight_offset for layer in zero[0][2:]} == {1.0}
    np.testing.assert_allclose(call(*zero, x)[0], call(*one, x)[0], rtol=1e-6, atol=1e-6)
    models = theirs, one[0], unswap(*zero)[0]
    arrays = (jax.tree.leaves(eqx.filter(model, eqx.is_array)) for model in models)
    for before, *after in zip(*arrays, strict=True):
        np.testing.assert_allclose(after, [before] * 2, rtol=1e-6, atol=1e-6)


def test_models_without_a_state_are_swapped_and_reconfigured_without_one():
    theirs = [eqx.nn.Linear(C, C, key=KEY), eqx.nn.LayerNorm(C), eqx.nn.RMSNorm(C)]
    model, state = swap(theirs)
    assert state is None
    assert isinstance(model[1], eqx_norm.LayerNorm)
    assert shapes(unswap(model)) == shapes((theirs, None))
    model, state = reconfigure(model, weight_offset=1.0)
    assert (state, model[2].weight_offset) == (None, 1.0)


def test_instance_norm_becomes_a_group_norm_by_unswap():
    model, x = eqx_norm.InstanceNorm(C, 1e-3, affine=True), normal(0, (C, 5), 1, 2)
    theirs, state = unswap(model, eqx.nn.State(()))
    again, _ = swap(theirs, state, activation=jax.nn.relu)
    assert (type(theirs), type(again)) == (eqx.nn.GroupNorm, eqx_norm.GroupNorm)
    np.testing.assert_allclose(theirs(x), model(x), atol=1e-5)
    np.testing.assert_allclose(again(x), jax.nn.relu(model(x)), atol=1e-6)


def test_list_of_axis_names_comes_back_as_a_tuple():
    """Records a limit: a list would make this package's layer unhashable."""

    def build(nn, key):
        return [nn.BatchNorm(C, ["a", "b"], mode="ema")]

    model, state = made(build, THEIRS)
    back, _ = unswap(*swap(model, state))
    assert (model[0].axis_name, back[0].axis_name) == (["a", "b"], ("a", "b"))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "bool"])
def test_changed_weight_offset_of_integer_weights_is_exact_or_an_error(dtype):
    ours = eqx_norm.RMSNorm(4, weight_offset=1.0)
    for weight, fits in (([0, 1, 1, 0], dtype != "bool"), ([0, 0, 0, 0], True)):
        model = eqx.tree_at(lambda model: model[0].weight, [ours], jnp.asarray(weight, dtype))
        if fits:
            theirs, _ = unswap(model)
            assert theirs[0].weight.dtype == dtype
            np.testing.assert_array_equal(theirs[0].weight, np.asarray(weight) + 1)
        else:
            with pytest.raises(TypeError, match=rf"^\[0\]: .* is not in {dtype}: weight \+ 1"):
                unswap(model)
    model = eqx.tree_at(lambda model: model[0].weight, [ours], jnp.zeros(4, dtype))
    for offset in (0.5, 200.0):
        with pytest.raises(TypeError, match=rf"^\[0\]: .* is not in {dtype}: weight"):
            reconfigure(model, weight_offset=offset)
    with pytest.raises(ValueError, match="outside of jit"):
        eqx.filter_jit(unswap)(model)


class PixelNorm(eqx.Module):
    weight: jax.Array

    def __call__(self, x):
        return x


class ConvNorm(eqx.Module):
    linear: Any

    def __call__(self, x):
        return self.linear(x)


class Normal(PixelNorm):
    """Stands for a module that is no norm."""


class LayerNormConfig(eqx.Module):
    """Stands for settings, which are no layer."""

    eps: float = 1e-5


class BatchNorm1d(PixelNorm):
    index: eqx.nn.StateIndex


def test_swap_warns_of_layers_named_like_norms_that_stay():
    linear, weight = eqx.nn.Linear(C, C, key=KEY), jnp.ones(C)
    folded: Any = FoldedBatchNorm
    quiet = [
        *(ConvNorm(linear), Normal(weight), LayerNormConfig(), eqx.nn.WeightNorm(linear)),
        *(eqx.nn.SpectralNorm(linear, "weight", key=KEY), ConvNorm(eqx.nn.LayerNorm(C))),
        *(eqx_norm.BatchNorm(C, "batch", approach="renorm"), folded()),
    ]
    norm, left = eqx.nn.LayerNorm(C), BatchNorm1d(weight, eqx.nn.StateIndex(weight))
    swap(eqx.nn.make_with_state(lambda: [*quiet, norm])()[0])  # warnings are errors
    loud = [norm, {"a": PixelNorm(weight)}, [left]]
    named = r"only norms of eqx\.nn, and left \[1\]\['a'\] \(PixelNorm\), \[2\]\[0\] \(BatchN"
    with pytest.warns(UserWarning, match=named) as warned:
        swapped, _ = swap(loud)
    assert isinstance(swapped[0], eqx_norm.LayerNorm)
    where = str(warned[0].message).split("where=")[1].removesuffix(").")
    assert where == "lambda path, layer: True"
    swap(loud, where=lambda path, layer: True)


class LayerNorm2d(eqx.nn.LayerNorm):
    """Stands for ConvNeXt's norm over the channels of each position."""


def test_swap_error_for_a_subclass_has_the_where_that_skips_it(tmp_path):
    subclass: Any = LayerNorm2d
    model, state = [subclass(C), eqx.nn.LayerNorm(C)], eqx.nn.State(())
    error = r"^\[0\]: tests\.\S+\.LayerNorm2d is a subclass, and .* where=(lambda .*)\.$"
    with pytest.raises(ValueError, match=error) as raised:
        swap(model, state)
    where = str(raised.value).split("where=")[1].removesuffix(".")
    left, other = swap(model, state, where=run(f"where = {where}", tmp_path)["where"])[0]
    assert type(left) is LayerNorm2d
    assert left.weight is model[0].weight
    assert type(other) is eqx_norm.LayerNorm
