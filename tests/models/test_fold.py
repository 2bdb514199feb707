"""Tests that a folded layer does what two layers did."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm import BatchNorm
from eqx_norm.models import FoldedBatchNorm, fold, freeze
from eqx_norm.models._layers import entries, found
from eqx_norm.strategies import Running
from tests.helpers import bits, cast, example, floats, normal, same
from tests.models.folding import KEY, Net, check, conv, norm, sequence, trained

LAYERS = {
    "linear": (lambda: eqx.nn.Linear(3, 4, key=KEY), ()),
    "linear without bias": (lambda: eqx.nn.Linear(3, 4, use_bias=False, key=KEY), ()),
    "linear of a number": (lambda: eqx.nn.Linear("scalar", 4, key=KEY), None),
    "1d without bias": (lambda: conv(use_bias=False), (8,)),
    "2d, stride, dilation": (
        lambda: eqx.nn.Conv2d(3, 4, 3, 2, padding="SAME", dilation=2, key=KEY),
        (7, 8),
    ),
    "3d": (lambda: eqx.nn.Conv3d(3, 4, 2, key=KEY), (3, 4, 3)),
    "grouped": (lambda: eqx.nn.Conv2d(6, 4, 3, groups=2, use_bias=False, key=KEY), (5, 5)),
    "depthwise": (lambda: eqx.nn.Conv1d(4, 4, 3, groups=4, key=KEY), (8,)),
    "circular": (lambda: conv(padding=1, padding_mode="CIRCULAR"), (8,)),
    "reflect": (lambda: conv(padding=1, padding_mode="REFLECT"), (8,)),
    "transposed": (
        lambda: eqx.nn.ConvTranspose2d(
            3, 4, 3, stride=2, padding=1, output_padding=1, use_bias=False, key=KEY
        ),
        (4, 5),
    ),
    "transposed, grouped": (
        lambda: eqx.nn.ConvTranspose1d(6, 4, 3, groups=2, dilation=2, key=KEY),
        (5,),
    ),
    "transposed, circular": (
        lambda: eqx.nn.ConvTranspose1d(
            3, 4, 3, padding="SAME", padding_mode="CIRCULAR", key=KEY
        ),
        (5,),
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_one_layer_does_what_two_did(name):
    make, spatial = LAYERS[name]
    layer = make()
    channels = getattr(layer, "in_channels", 3)
    x = floats(normal(1, (5,) if spatial is None else (5, channels, *spatial), 1, 2))
    affine = "bias" in name or "grouped" in name  # some with a weight of their own, some not
    activation = jax.nn.gelu if "transposed" in name else None
    model, state = sequence(layer, norm(channelwise_affine=affine, activation=activation))
    folded, left, report = check(model, state, x)
    assert type(folded.layers[0]) is type(layer)
    kept, new = vars(layer), vars(folded.layers[0])
    assert {f for f in kept if kept[f] is not new[f]} <= {"weight", "bias", "use_bias"}
    assert not entries(left)
    assert report.folded == (("layers[0]", "layers[1]"),)
    assert not report.left


@pytest.mark.x32  # a dtype of its own
def test_in_half_precision_it_is_rounded_once():
    """The statistics are float32; what is computed of them in float64 becomes bfloat16."""
    model, state = sequence(conv(), norm())
    model = cast(model, jnp.bfloat16)
    folded, _, _ = check(model, state, normal(1, (5, 3, 8)).astype(jnp.bfloat16), rtol=0.02)
    wide, _, _ = fold(cast(model, jnp.float32), state)
    assert bits(folded.layers[0].weight) == bits(wide.layers[0].weight.astype(jnp.bfloat16))


def test_large_statistics():
    """The bias is large, and the difference of two large numbers is taken in float64."""
    model, state = sequence(conv(use_bias=False), norm(channelwise_affine=False))
    memory = Running.loaded(floats([1e4, -1e4, 300, 0]), floats([1e8, 1e6, 1e-4, 0]))
    state = state.set(model.layers[1].memory_index, memory)
    folded, _, _ = fold(model, state)
    mean, variance = np.asarray(memory.mean, float), np.asarray(memory.variance, float)
    expected = -mean / np.sqrt(variance + 1e-5)
    np.testing.assert_allclose(folded.layers[0].bias[:, 0], expected, rtol=2e-7)


def test_a_network():
    model, state = trained(*eqx.nn.make_with_state(Net)())
    x = floats(normal(1, (5, 3, 8)))
    folded, left, report = check(
        model, state, x, {"conv1": "bn1", "branches[0]": "branches[1]"}
    )
    assert report.folded == (
        ("stem.layers[1].layers[0]", "stem.layers[1].layers[1]"),
        ("conv1", "bn1"),
        ("branches[0]", "branches[1]"),
    )
    assert dict(report.left) == {
        "stem.layers[0]": "is the first of its Sequential",
        "stem.layers[1].layers[3]": "follows a Lambda",
        "stem.layers[2]": "follows a Sequential",
    }
    lines = str(report).splitlines()
    assert lines[1] == "folded  conv1                     <- bn1"
    assert lines[-1] == "left    stem.layers[2]            follows a Sequential"
    # What is left of the state is in the order of the model's indices, and still its own.
    indices = found(folded, eqx.nn.StateIndex).values()
    assert [index.marker for index in indices] == list(entries(left))
    assert all(same(left.get(index), state.get(index)) for index in indices)
    _, _, report = check(model, state, x)
    assert dict(report.left)["bn1"].startswith("follows nothing in a Sequential: name")


def test_a_norm_of_two_layers():
    """One norm, called after either of two convolutions, is folded into both."""

    class Twice(eqx.Module):
        convs: list
        norm: BatchNorm

        def __call__(self, x, state):
            for layer in self.convs:
                x, state = self.norm(layer(x), state)
            return x, state

    def build():
        return Twice([eqx.nn.Conv1d(3, 3, 1, key=KEY) for _ in range(2)], norm(3))

    model, state = trained(*eqx.nn.make_with_state(build)())
    pairs = {"convs[0]": "norm", "convs[1]": "norm"}
    _, left, _ = check(model, state, floats(normal(1, (5, 3, 4))), pairs)
    assert not entries(left)


def test_a_memory_that_another_norm_reads_stays():
    model, state = sequence(conv(), norm(), eqx.nn.Lambda(jax.nn.relu), norm())
    index = model.layers[1].memory_index
    model = eqx.tree_at(lambda m: m.layers[3].memory_index, model, index)
    _, left, report = check(model, state, floats(normal(1, (5, 3, 8))))
    assert len(report.folded) == len(report.left) == 1
    assert same(left.get(index), state.get(index))


def test_frozen_norms_are_folded_in_training_too():
    model, state = sequence(conv(), norm())
    frozen = eqx.nn.inference_mode(freeze(model), False)
    check(frozen, state, floats(normal(1, (5, 3, 8))))


def test_the_folded_norm():
    model, state = sequence(conv(), norm(activation=jax.nn.relu))
    folded, left, _ = fold(model, state)
    layer, x = folded.layers[1], floats(normal(1, (4, 6)))
    assert type(layer) is FoldedBatchNorm
    y, after = layer(x, left, key=KEY, inference=True)
    np.testing.assert_array_equal(y, jax.nn.relu(x))
    assert after is left
    # Models that ask `isinstance(layer, eqx.nn.BatchNorm)` give it no state.
    np.testing.assert_array_equal(layer(x), jax.nn.relu(x))
    with pytest.raises(ValueError, match="mask= was given .*folded.*from before fold"):
        layer(x, left, mask=jnp.array(True))
    with pytest.raises(ValueError, match="inference=False was given"):
        layer(x, left, inference=False)
    # A folded Sequential with no other norm can be called without a state.
    np.testing.assert_array_equal(folded(floats(normal(1, (3, 8)))).shape, (4, 6))


def test_no_norm_at_all():
    model, state = sequence(conv())
    folded, _, report = fold(model, state)
    assert str(report) == "no batch norm"
    assert same(folded, model)


def test_the_given_model_is_as_it_was():
    model, state = sequence(conv(use_bias=False), norm())
    before = [dataclasses.asdict(model.layers[0]), jax.tree.leaves(state)]
    fold(model, state)
    after = [dataclasses.asdict(model.layers[0]), jax.tree.leaves(state)]
    assert same(before, after)
    assert not model.layers[0].use_bias
    assert model.layers[0].bias is None


def test_example(capsys):
    example(fold)
    assert capsys.readouterr().out == "folded  layers[0]  <- layers[1]\n"
