"""Tests that a folded layer does what two did, and that what is left has a reason."""

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
from tests.compiling import filter_jit
from tests.helpers import bits, cast, example, floats, member, normal, over_batch, same

KEY = jax.random.key(0)


def trained(model, state, seed=0):
    """Returns both with statistics, weights and biases of norms that are not 0 or 1."""
    random = np.random.RandomState(seed)
    for norm in found(model, BatchNorm).values():
        n = norm.input_size
        memory = Running.loaded(floats(random.randn(n)), floats(0.5 + random.rand(n)))
        state = state.set(norm.memory_index, memory)

    def new(array):
        return jnp.asarray(1 + 0.5 * random.randn(*array.shape), array.dtype)

    def affine(node):
        if not isinstance(node, BatchNorm) or node.weight is None:
            return node
        return eqx.tree_at(lambda n: (n.weight, n.bias), node, replace_fn=new)

    model = jax.tree.map(affine, model, is_leaf=lambda n: isinstance(n, BatchNorm))
    return eqx.nn.inference_mode(model), state


def sequence(*layers):
    """Returns a trained `Sequential`, in inference mode, and its state."""
    return trained(*eqx.nn.make_with_state(eqx.nn.Sequential)(list(layers)))


def norm(channels=4, **kwargs):
    return BatchNorm(channels, "batch", approach="batch", **kwargs)


def conv(**kwargs):
    return eqx.nn.Conv1d(3, 4, 3, key=KEY, **kwargs)


@filter_jit
def outputs(model, state, folded, left, x):
    return over_batch(model)(x, state)[0], over_batch(folded)(x, left)[0]


def check(model, state, x, pairs=None, rtol=1e-5):
    """Folds; both give the same, to 1e-5 of the largest output; the other state stays."""
    folded, left, report = fold(model, state, pairs)
    y, ours = outputs(model, state, folded, left, x)
    assert y.dtype == ours.dtype
    y, ours = np.asarray(y, np.float64), np.asarray(ours, np.float64)
    np.testing.assert_allclose(ours, y, rtol=0, atol=rtol * np.abs(y).max())
    return folded, left, report


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


class Net(eqx.Module):
    stem: eqx.nn.Sequential
    conv1: eqx.nn.Conv1d
    bn1: BatchNorm
    branches: list
    out: eqx.nn.Linear

    def __init__(self):
        self.stem = eqx.nn.Sequential(
            [
                norm(3),
                eqx.nn.Sequential([conv(), norm(), eqx.nn.Lambda(jax.nn.relu), norm()]),
                norm(),
                eqx.nn.Conv1d(4, 4, 1, key=KEY),
                eqx.nn.Lambda(jax.nn.relu),
            ]
        )
        self.conv1 = eqx.nn.Conv1d(4, 4, 1, key=KEY)
        self.bn1 = norm(activation=jax.nn.relu)
        self.branches = [eqx.nn.Conv1d(4, 4, 1, use_bias=False, key=KEY), norm()]
        self.out = eqx.nn.Linear(4, 2, key=KEY)

    def __call__(self, x, state):
        x, state = self.stem(x, state)
        y, state = self.bn1(self.conv1(x), state)
        z, state = self.branches[1](self.branches[0](x), state)
        return self.out((y + z).mean(1)), state


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
            for conv in self.convs:
                x, state = self.norm(conv(x), state)
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


class Standardised(eqx.nn.Conv1d):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)

    def __call__(self, x, *, key=None):
        return super().__call__(x - x.mean(), key=key)


class Shifted(BatchNorm):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)

    def __call__(self, x, state, **kwargs):
        return super().__call__(x + 1, state, **kwargs)


def complex_conv():
    return eqx.nn.Conv1d(3, 4, 3, dtype=jnp.complex64, key=KEY)


# Layers, and why the last of them is left.
LEFT = {
    "of equinox": (
        lambda: [conv(), eqx.nn.BatchNorm(4, "batch", mode="ema")],
        "is not of eqx_norm but equinox's BatchNorm",
    ),
    "a subclass": (
        lambda: [conv(), Shifted(4, "batch", approach="batch")],
        "is a Shifted, a subclass with methods of its own",
    ),
    "a convolution's subclass": (
        lambda: [Standardised(3, 4, 3, key=KEY), norm()],
        "follows a Standardised, which computes in a way of its own",
    ),
    "a number": (
        lambda: [eqx.nn.Linear(3, "scalar", key=KEY), norm(1)],
        "follows a Linear with out_features='scalar', which has no channels",
    ),
    "channels": (lambda: [conv(), norm(5)], "has 5 channels, and the layer before it gives 4"),
    "complex": (lambda: [complex_conv(), norm(dtype=jnp.complex64)], "is of complex numbers"),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_cannot_be_folded_is_left(name):
    make, reason = LEFT[name]
    model, state = eqx.nn.make_with_state(eqx.nn.Sequential)(make())
    model = eqx.nn.inference_mode(model)
    folded, left, report = fold(model, state)
    assert report == ((), (("layers[1]", reason),))
    assert jax.tree.structure((folded, left)) == jax.tree.structure((model, state))
    assert same((folded, left), (model, state))
    if name != "of equinox":
        with pytest.raises(ValueError, match=r"layers\[1\] " + reason):
            fold(model, state, {"layers[0]": "layers[1]"})


def test_a_norm_in_training_is_left():
    model, state = sequence(conv(), norm())
    training = eqx.nn.inference_mode(model, False)
    folded, left, report = fold(training, state)
    assert "is in training mode: fold(eqx.nn.inference_mode(model), state)" in str(report)
    assert same((folded, left), (training, state))


def test_an_ensemble_is_left_and_its_members_are_folded():
    @eqx.filter_vmap
    def ensemble(key):
        layers = [eqx.nn.Conv1d(3, 4, 3, key=key), norm()]
        return eqx.nn.make_with_state(eqx.nn.Sequential)(layers)

    models, states = ensemble(jax.random.split(KEY, 2))
    models = eqx.nn.inference_mode(models)
    _, _, report = fold(models, states)
    assert report.left == (
        ("layers[1]", "is an ensemble's, with one axis more: fold each member by itself"),
    )
    check(member(models, 1), member(states, 1), floats(normal(1, (5, 3, 8))))


def test_what_is_shared_is_left():
    def build():
        layers = [conv(), norm()]
        return eqx.nn.Shared(
            (eqx.nn.Sequential(layers), norm()),
            lambda pair: pair[1].weight,
            lambda pair: pair[0].layers[1].weight,
        )

    model, state = eqx.nn.make_with_state(build)()
    _, _, report = fold(eqx.nn.inference_mode(model), state)
    assert dict(report.left)["pytree[0].layers[1]"].startswith("is inside of an eqx.nn.Shared")


def test_a_weight_that_would_not_be_finite_is_left():
    model, state = sequence(cast(conv(), jnp.float16), norm())
    memory = Running.loaded(floats(np.full(4, 1e6)), floats(np.ones(4)))
    state = state.set(model.layers[1].memory_index, memory)
    _, _, report = fold(model, state)
    assert report.left == (("layers[1]", "would make a weight that is not finite"),)


class Pair(eqx.Module):
    first: eqx.nn.Conv1d
    second: eqx.nn.Conv1d
    norm: BatchNorm
    both: eqx.nn.Sequential


WRONG = [
    (
        {"frist": "norm"},
        "no linear layer at 'frist'. Those of this model are 'first', 'second'",
    ),
    (
        {"first": "nrom"},
        "no batch norm at 'nrom'. Those of this model are 'norm', 'both.layers",
    ),
    ({"first": "first"}, "no batch norm at 'first'"),
    (
        {"first": "both.layers[1]"},
        r"both.layers\[1\] follows both.layers\[0\]. Leave that pair out",
    ),
    ({"both.layers[0]": "norm"}, r"in their Sequential both.layers\[1\] follows both"),
]


@pytest.mark.parametrize(("pairs", "message"), WRONG, ids=str)
def test_wrong_pairs(pairs, message):
    def build():
        return Pair(conv(), conv(), norm(), eqx.nn.Sequential([conv(), norm()]))

    model, state = trained(*eqx.nn.make_with_state(build)())
    (pair,) = pairs.items()
    with pytest.raises(ValueError, match=message) as error:
        fold(model, state, pairs)
    assert f"pairs={{{pair[0]!r}: {pair[1]!r}}}: " in str(error.value)
    state.get(model.norm.memory_index)  # it is still valid


def test_a_state_of_another_model():
    model, _ = sequence(conv(), norm())
    _, other = eqx.nn.make_with_state(Net)()
    with pytest.raises(ValueError, match="made for another model"):
        fold(model, other)


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
