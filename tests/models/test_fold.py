"""Tests that a folded layer computes the outputs of a layer and its norm."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm import BatchNorm
from eqx_norm.models import fold_pairs, freeze, propose_pairs, swap
from eqx_norm.models._layers import entries, layers_of
from eqx_norm.strategies import Running
from tests.compiling import filter_jit
from tests.helpers import bits, cast, floats, normal, over_batch, random_layer, remember, same
from tests.models.nested import donatable

UNOPTIMISED = True  # compares values: tests/compiling.py


def trained(layers: Any) -> tuple[Any, Any]:
    """Returns layers in inference mode and their state, with random values, so that no
    statistic, weight or bias is 0 or 1."""
    model, state = eqx.nn.make_with_state(lambda: layers)()
    random = np.random.RandomState(0)
    arrays, rest = eqx.partition((model, state), eqx.is_inexact_array)
    arrays = jax.tree.map(lambda a: floats(random.uniform(0.5, 2, a.shape)), arrays)
    model, state = eqx.combine(arrays, rest)
    return eqx.nn.inference_mode(model), state


def norm(channels=4, **kwargs):
    return BatchNorm(channels, "batch", approach="batch", **kwargs)


def conv(channels=3, out=4, size=3, **kwargs):
    return random_layer(eqx.nn.Conv1d, channels, out, size, **kwargs)


@filter_jit
def outputs(models, states, x):
    return [over_batch(m)(x, s)[0] for m, s in zip(models, states, strict=True)]


def check(model, state, x, pairs):
    """Folds, and checks that outputs agree to 1e-5 of the largest."""
    folded, left = fold_pairs(model, state, pairs)
    ours, y = outputs((folded, model), (left, state), x)
    np.testing.assert_allclose(ours, y, rtol=0, atol=1e-5 * float(abs(y).max()))
    assert donatable((folded, left))
    return folded, left


PAIR = {"layers[0]": "layers[1]"}
LAYERS = {
    "linear": (random_layer(eqx.nn.Linear, 3, 4), ()),
    "grouped": (random_layer(eqx.nn.Conv2d, 6, 4, 3, groups=2, use_bias=False), (5, 5)),
    "transposed, grouped": (random_layer(eqx.nn.ConvTranspose1d, 6, 4, 3, groups=2), (5,)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_folded_layer_equals_the_layer_and_its_norm(name):
    layer, spatial = LAYERS[name]
    channels = getattr(layer, "in_channels", 3)
    x = floats(normal(1, (5, channels, *spatial), 1, 2))
    layers = [layer, norm(channelwise_affine=name != "grouped", weight_offset=0.5)]
    sequence, state = trained(eqx.nn.Sequential(layers))
    before = jax.tree.leaves((sequence, state))
    _, left = check(sequence, state, x, PAIR)
    assert not entries(left)
    assert same(before, jax.tree.leaves((sequence, state)))
    # A frozen norm in training mode is folded, too.
    check(eqx.nn.inference_mode(freeze(sequence), False), state, x, PAIR)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_fold_computes_in_float64_and_rounds_once(dtype):
    first, second = cast(conv(use_bias=False), dtype), norm(channelwise_affine=False)
    second, state = eqx.nn.make_with_state(lambda: eqx.nn.inference_mode(second))()
    memory = Running.loaded(floats([1e4, -1e4, 300, 0]), floats([1e8, 1e6, 1e-4, 0]))
    state = remember(second, state, memory)
    (folded, _), _ = fold_pairs([first, second], state, {"[0]": "[1]"})
    mean, variance = np.asarray(memory.mean, float), np.asarray(memory.variance, float)
    scale = 1 / np.sqrt(variance + 1e-5)
    weight = np.asarray(first.weight).astype(float) * scale[:, None, None]
    assert bits(folded.weight) == bits(weight.astype(dtype))
    np.testing.assert_array_equal(folded.bias[:, 0], (scale * -mean).astype(dtype))


def test_fold_pairs_by_proposed_pairs():
    branch = eqx.nn.Sequential([conv(4, 6), norm(6)])
    layers = [conv(), norm(activation=jax.nn.relu), conv(4), norm(), branch, norm(6)]
    model, state = trained(eqx.nn.Sequential(layers))
    pairs = propose_pairs(eqx.nn.inference_mode(model, False))
    branch_pair = {"layers[4].layers[0]": "layers[4].layers[1]"}
    assert pairs == {"layers[0]": "layers[1]", "layers[2]": "layers[3]"} | branch_pair
    folded, left = check(model, state, floats(normal(1, (5, 3, 12))), pairs)
    assert [*layers_of(folded, BatchNorm)] == ["layers[5]"]
    indices = layers_of(folded, eqx.nn.StateIndex).values()
    assert [index.marker for index in indices] == list(entries(left))
    assert all(same(left.get(index), state.get(index)) for index in indices)
    # Models that check `isinstance(layer, eqx.nn.BatchNorm)` pass no state to the replacement.
    x = floats([-1, 1])
    np.testing.assert_array_equal(folded.layers[1](x), jax.nn.relu(x))


def close(ours, expected):
    """Checks that arrays of two pytrees agree to 1e-5 of the largest number of the array."""
    for a, b in zip(*map(jax.tree.leaves, (ours, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * float(abs(b).max()))


@pytest.mark.parametrize(
    ("name", "frozen"),
    [("linear", True), ("grouped", False), ("transposed, grouped", False)],
)
def test_gradients_through_a_folded_layer_are_those_through_the_norm(name, frozen):
    layer, spatial = LAYERS[name]
    x = floats(normal(1, (5, getattr(layer, "in_channels", 3), *spatial), 1, 2))
    activation = eqx.nn.PReLU(0.25)
    layers = [layer, norm(weight_offset=0.5, activation=activation)]
    model, state = trained(eqx.nn.Sequential(layers))
    model = freeze(model) if frozen else model
    dy = floats(normal(2, jax.eval_shape(over_batch(model), x, state)[0].shape))

    def loss(model_and_state, folds):
        model, state = model_and_state
        if folds:
            model, state = fold_pairs(model, state, PAIR)
        return jnp.sum(over_batch(model)(x, state)[0] * dy)

    of_fold, of_norm = (
        eqx.filter_jit(eqx.filter_grad(loss))((model, state), folds) for folds in (True, False)
    )
    close(of_fold, of_norm)
    first, second = of_norm[0].layers
    assert all(np.any(g) for g in jax.tree.leaves(first))
    assert all(np.any(g) != frozen for g in (second.weight, second.bias))
    # Without jit, too; and a model whose arrays are constants of a compiled function.
    close(eqx.filter_grad(loss)((model, state), True), of_fold)
    folded = filter_jit(lambda: fold_pairs(model, state, PAIR)[0])()
    close(folded, fold_pairs(model, state, PAIR)[0])


class Double(eqx.Module):  # without leaves
    def __call__(self, x):
        return 2 * x


def test_propose_pairs_leaves_out_pairs_that_cannot_be_folded():
    relu, quantised = eqx.nn.Lambda(jax.nn.relu), jax.tree.map(jnp.int8, conv())
    for between in (relu, jnp.tanh, Double(), eqx.nn.LayerNorm((4, 6)), [conv(4)], conv(4, 5)):
        assert propose_pairs([conv(), between, norm()]) == {}
    for first in (conv(out=5), [conv()], eqx.nn.WeightNorm(conv()), quantised):
        assert propose_pairs([first, norm()]) == {}
    # The first norm of the next block, and two norms of two convolutions, are no pairs.
    for rest in ([[norm()]], [conv(4), norm(), norm()]):
        assert propose_pairs([conv(), *rest]) == {}
    theirs = eqx.nn.BatchNorm(4, "batch", mode="batch")
    model, state = eqx.nn.make_with_state(lambda: [conv(3), conv(4), None, theirs])()
    pairs = {"[1]": "[3]"}
    assert propose_pairs(model) == propose_pairs(swap(model, state)[0]) == pairs
    assert propose_pairs(eqx.filter_vmap(lambda _: model)(jnp.ones(4))) == pairs
