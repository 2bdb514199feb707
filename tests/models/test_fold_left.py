"""Tests that what cannot be folded is left, or is an error, with the reason."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm import BatchNorm
from eqx_norm.models import fold
from eqx_norm.strategies import Running
from tests.helpers import cast, floats, member, normal, same
from tests.models.folding import KEY, Net, check, conv, norm, sequence, trained


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
