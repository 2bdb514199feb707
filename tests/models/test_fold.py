"""Tests that a folded layer does what two layers did, and what cannot be folded is an error."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm import BatchNorm
from eqx_norm.models import FoldedBatchNorm, fold, fold_pairs, freeze
from eqx_norm.models._layers import each, entries, found
from eqx_norm.strategies import Running
from tests.compiling import filter_jit
from tests.helpers import bits, cast, copy, example, floats, normal, over_batch, same
from tests.models.nested import KEY, unchecked


def trained(layers: Any, seed: int = 0) -> tuple[Any, Any]:
    """Returns layers in inference mode, and their state, with statistics, weights and biases of
    norms that are not 0 or 1."""
    model, state = eqx.nn.make_with_state(lambda: layers)()
    random = np.random.RandomState(seed)

    def new(_, norm):
        nonlocal state
        n = norm.input_size
        memory = Running.loaded(floats(random.randn(n)), floats(0.5 + random.rand(n)))
        state = state.set(norm.memory_index, memory)
        weights, rest = eqx.partition(norm, eqx.is_inexact_array)
        weights = jax.tree.map(lambda a: 1 + 0.5 * floats(random.randn(*a.shape)), weights)
        return eqx.combine(weights, rest)

    model = each(eqx.nn.inference_mode(model), BatchNorm, new)
    return model, state


def norm(channels=4, **kwargs):
    return BatchNorm(channels, "batch", approach="batch", **kwargs)


def conv(channels=3, out=4, size=3, **kwargs):
    return eqx.nn.Conv1d(channels, out, size, key=KEY, **kwargs)


@filter_jit
def outputs(models, states, x):
    return [over_batch(m)(x, s)[0] for m, s in zip(models, states, strict=True)]


def check(model, state, x, pairs=None, rtol=1e-5):
    """Folds; both give the same, to 1e-5 of the largest output."""
    folded, left = fold_pairs(model, state, pairs or {"layers[0]": "layers[1]"})
    ours, y = outputs((folded, model), (left, state), x)
    assert y.dtype == ours.dtype
    y, ours = np.asarray(y, np.float64), np.asarray(ours, np.float64)
    np.testing.assert_allclose(ours, y, rtol=0, atol=rtol * np.abs(y).max())
    return folded, left


SETTINGS: dict[str, Any] = {"key": KEY, "use_bias": False}
LAYERS = {
    "linear": (eqx.nn.Linear(3, 4, key=KEY), ()),
    "linear without bias": (eqx.nn.Linear(3, 4, **SETTINGS), ()),
    "linear of a number": (eqx.nn.Linear("scalar", 4, key=KEY), None),
    "1d without bias": (conv(use_bias=False), (8,)),
    "2d": (eqx.nn.Conv2d(3, 4, 3, 2, padding="SAME", dilation=2, key=KEY), (7, 8)),
    "3d": (eqx.nn.Conv3d(3, 4, 2, key=KEY), (3, 4, 3)),
    "grouped": (eqx.nn.Conv2d(6, 4, 3, groups=2, **SETTINGS), (5, 5)),
    "circular": (conv(padding=1, padding_mode="CIRCULAR"), (8,)),
    "transposed": (eqx.nn.ConvTranspose2d(3, 4, 3, 2, 1, 1, **SETTINGS), (4, 5)),
    "transposed, grouped": (eqx.nn.ConvTranspose1d(6, 4, 3, groups=2, key=KEY), (5,)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_one_layer_does_what_two_did(name):
    layer, spatial = LAYERS[name]
    channels = getattr(layer, "in_channels", 3)
    x = floats(normal(1, (5,) if spatial is None else (5, channels, *spatial), 1, 2))
    affine = "bias" in name or "grouped" in name  # some with a weight of their own, some not
    sequence, state = trained(eqx.nn.Sequential([layer, norm(channelwise_affine=affine)]))
    before = jax.tree.leaves((sequence, state))
    folded, left = check(sequence, state, x)
    alone = fold(sequence.layers[0], sequence.layers[1], state)
    assert eqx.tree_equal(alone, folded.layers[0])
    kept, new = vars(layer), vars(alone)
    assert type(alone) is type(layer)
    assert {f for f in kept if kept[f] is not new[f]} <= {"weight", "bias", "use_bias"}
    assert not entries(left)
    assert same(before, jax.tree.leaves((sequence, state)))


def test_frozen_norms_are_folded_in_training_too():
    model, state = trained(eqx.nn.Sequential([conv(), norm()]))
    check(eqx.nn.inference_mode(freeze(model), False), state, floats(normal(1, (5, 3, 8))))


def test_in_half_precision_it_is_rounded_once():
    """The statistics are float32; what is computed of them in float64 becomes bfloat16."""
    model, state = trained(eqx.nn.Sequential([conv(), norm()]))
    model = cast(model, jnp.bfloat16)
    folded, _ = check(model, state, normal(1, (5, 3, 8)).astype(jnp.bfloat16), rtol=0.02)
    first, second = cast(model, jnp.float32).layers
    wide = fold(first, second, state)
    assert bits(folded.layers[0].weight) == bits(wide.weight.astype(jnp.bfloat16))


def test_of_large_statistics_the_difference_is_taken_in_float64():
    first, second = conv(use_bias=False), norm(channelwise_affine=False, inference=True)
    second, state = eqx.nn.make_with_state(lambda: second)()
    memory = Running.loaded(floats([1e4, -1e4, 300, 0]), floats([1e8, 1e6, 1e-4, 0]))
    folded = fold(first, second, state.set(second.memory_index, memory))
    mean, variance = np.asarray(memory.mean, float), np.asarray(memory.variance, float)
    right = -mean / np.sqrt(variance + 1e-5)
    np.testing.assert_allclose(np.asarray(folded.bias)[:, 0], right, rtol=2e-7)


class Net(eqx.Module):
    """Calls one norm after either of two layers, and another between branches."""

    stem: Any
    convs: list
    bn: BatchNorm
    bn1: BatchNorm

    def __init__(self):
        self.bn, self.bn1 = norm(), norm(activation=jax.nn.relu)
        self.convs = [conv(4, size=1) for _ in range(3)]
        inner = eqx.nn.Sequential([conv(), norm(), eqx.nn.Lambda(jax.nn.relu), norm()])
        self.stem = eqx.nn.Sequential([norm(3), inner])

    def __call__(self, x, state):
        x, state = self.stem(x, state)
        y, state = self.bn1(self.convs[0](x), state)
        for layer in self.convs[1:]:
            x, state = self.bn(layer(x), state)
        return x + y, state


def test_a_network_by_pairs():
    model, state = trained(Net())
    first = {"stem.layers[1].layers[0]": "stem.layers[1].layers[1]", "convs[0]": "bn1"}
    pairs = first | {"convs[1]": "bn", "convs[2]": "bn"}
    x = floats(normal(1, (5, 3, 8)))
    folded, left = check(model, state, x, pairs)
    assert [*found(folded, BatchNorm)] == ["stem.layers[0]", "stem.layers[1].layers[3]"]
    # What is left of the state is in the order of the model's indices, and still its own.
    indices = found(folded, eqx.nn.StateIndex).values()
    assert [index.marker for index in indices] == list(entries(left))
    assert all(same(left.get(index), state.get(index)) for index in indices)
    layer = folded.bn1
    assert type(layer) is FoldedBatchNorm
    y, after = layer(x, left, key=KEY, inference=True)
    assert after is left
    np.testing.assert_array_equal(y, jax.nn.relu(x))
    # Models that ask `isinstance(layer, eqx.nn.BatchNorm)` give it no state.
    np.testing.assert_array_equal(layer(x), jax.nn.relu(x))


def test_a_memory_that_another_norm_reads_stays():
    layers = [conv(), norm(), eqx.nn.Lambda(jax.nn.relu), norm()]
    model, state = trained(eqx.nn.Sequential(layers))
    index = model.layers[1].memory_index
    model = eqx.tree_at(lambda m: m.layers[3].memory_index, model, index)
    _, left = check(model, state, floats(normal(1, (5, 3, 8))))
    assert same(left.get(index), state.get(index))


class Standardised(eqx.nn.Conv1d):
    def __call__(self, x, *, key=None):
        return super().__call__(x - x.mean(), key=key)


class Shifted(BatchNorm):
    pass


OWN: dict[str, Any] = {"conv": Standardised, "norm": Shifted}  # not checked as types
INT8 = jax.tree.map(lambda array: array.astype(jnp.int8), conv())
MEMBERS = jax.tree.map(lambda array: jnp.stack([array] * 2), conv())
SHARED = [conv(), conv(), norm()], lambda m: m[1].weight, lambda m: m[0].weight
SPECTRAL, WEIGHT = eqx.nn.SpectralNorm(conv(), "weight", key=KEY), eqx.nn.WeightNorm(conv())
COMPLEX = {"dtype": jnp.complex64}
# Layers, the error, and the pair.
WRONG: list[Any] = [
    ([conv(), norm()], r"'\[2\]'.* those of .*are '\[0\]'", {"[2]": "[1]"}),
    ([conv(), norm()], r"'\[1\]'.* those of .*are '\[0\]'", {"[1]": "[0]"}),
    ([conv()], r"'\[1\]'.* those of .*are none"),
    ([conv(), eqx.nn.BatchNorm(4, "batch", mode="ema")], r"equinox\S+BatchNorm.*models\.swap"),
    ([conv(), OWN["norm"](4, "batch", approach="ema")], "Shifted"),
    ([OWN["conv"](1, 3, 4, 3, key=KEY), norm()], "Standardised"),
    ([conv(), norm(5)], "5 channels"),
    ([MEMBERS, norm()], "ensemble"),
    ([conv(**COMPLEX), norm(**COMPLEX)], "arrays of complex64"),
    ([INT8, norm()], "arrays of int8"),
    ([eqx.nn.Shared(*SHARED), norm()], r"\[0\] is .*nn\.Shared", {"[0].pytree[0]": "[1]"}),
    (eqx.nn.Shared(*SHARED), r"\[0\] is .*nn\.Shared", {"pytree[0]": "pytree[2]"}),
    ([SPECTRAL, norm()], r"\[0\].layer is .*nn\.SpectralNorm", {"[0].layer": "[1]"}),
    ([WEIGHT, norm()], r"\[0\].layer is .*nn\.WeightNorm", {"[0].layer": "[1]"}),
]


@pytest.mark.parametrize("row", WRONG, ids=lambda row: row[1])
def test_what_cannot_be_folded_is_an_error_that_says_why(row):
    layers, error, *given = row
    pairs = given[0] if given else {"[0]": "[1]"}
    model, state = eqx.nn.make_with_state(lambda: layers)()
    model = eqx.nn.inference_mode(model)
    with pytest.raises(ValueError, match=error) as raised:
        fold_pairs(model, state, pairs)
    assert str(raised.value).startswith(f"pairs={pairs!r}: ")
    if not given and len(layers) == 2:
        with unchecked(), pytest.raises(ValueError, match=error) as raised:
            fold(model[0], model[1], state)
        assert "pairs" not in str(raised.value)


def test_other_errors_and_the_example_in_the_docstring():
    (layer, second), state = trained([conv(), norm()])
    training = eqx.nn.inference_mode(second, False)
    with pytest.raises(ValueError, match=r"'\[2\]': '\[3\]'}: the norm is in training mode"):
        fold_pairs([layer, second, layer, training], state, {"[0]": "[1]", "[2]": "[3]"})
    active, active_state = trained([conv(), norm(activation=jax.nn.relu)])
    with pytest.raises(ValueError, match="activation="):
        fold(active[0], active[1], active_state)
    with pytest.raises(ValueError, match="another model"):
        fold(layer, second, trained(Net())[1])
    far = Running.loaded(floats([1e6] * 4), floats([1.0] * 4))
    with pytest.raises(ValueError, match="not finite in float16"):
        fold(cast(layer, jnp.float16), second, copy(state).set(second.memory_index, far))
    names = {"fold": fold, "eqx": eqx, "conv": layer, "norm": second, "state": state}
    assert eqx.tree_equal(example(fold, **names)["conv"], fold(layer, second, state))
