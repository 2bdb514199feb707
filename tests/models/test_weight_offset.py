"""Tests that the functions for models keep outputs if a layer's `weight_offset` changes."""

import equinox as eqx
import jax
import numpy as np
import pytest

from eqx_norm import LayerNorm, RMSNorm
from eqx_norm.models import fold_pairs, from_torch, reconfigure, swap, to_torch, unswap
from tests.helpers import normal
from tests.layers.norms import moved
from tests.models.nested import OURS, THEIRS, C, call, made, norm


def every_norm(nn, key):
    norms = nn.LayerNorm(C, use_bias=False), nn.GroupNorm(1, C), nn.RMSNorm(C)
    return [norm(nn), eqx.nn.Linear(C, C, key=key), *norms]


def with_other_weights(model):
    arrays, static = eqx.partition(model, eqx.is_inexact_array)
    return eqx.combine(moved(arrays), static)


def close(a, b):
    for actual, expected in zip(*map(jax.tree.leaves, (a, b)), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6)


def weights(model):
    return jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array))


def around_one(model, state):
    return reconfigure(model, state, weight_offset=0.0)


WAYS = {"reconfigure": (OURS, reconfigure, around_one), "swap": (THEIRS, swap, unswap)}


@pytest.mark.parametrize("members", [0, 2])
@pytest.mark.parametrize(("nn", "there", "back"), WAYS.values(), ids=WAYS)
def test_changed_weight_offset_keeps_outputs_and_is_undone(nn, there, back, members):
    model, state = made(every_norm, nn, members=members)
    model, x = with_other_weights(model), normal(0, (members, 8, C)[not members :])
    around_zero = there(model, state, weight_offset=1.0)
    assert {layer.weight_offset for layer in around_zero[0][2:]} == {1.0}
    close(call(*around_zero, x)[0], call(*there(model, state, weight_offset=0.0), x)[0])
    close(weights(back(*around_zero)[0]), weights(model))


def test_unswap_refuses_axis_0():
    with pytest.raises(ValueError, match=r"^\[0\]: axis=0: Equinox's layer has none"):
        unswap([LayerNorm(C, axis=0)], eqx.nn.State(()))


def test_fold_with_weight_offset():
    model, state = made(lambda nn, key: [eqx.nn.Linear(C, C, key=key), norm(nn)], OURS)
    _, state = call(model := with_other_weights(model), state, normal(0, (8, C)))
    model = eqx.nn.inference_mode(model)
    folded = fold_pairs(*reconfigure(model, state, weight_offset=1.0), {"[0]": "[1]"})
    close(folded, fold_pairs(model, state, {"[0]": "[1]"}))


def test_from_torch_and_to_torch_copy_the_stored_weight():
    """Tests a norm like Gemma's, whose checkpoint has the weight minus one."""
    layer = {"norm": RMSNorm(C, use_bias=False, weight_offset=1.0)}
    stored = np.array([0.25, -0.5, 0.0], np.float32)
    loaded, *_ = from_torch(layer, None, {"norm.weight": stored})
    np.testing.assert_array_equal(loaded["norm"].weight, stored)
    np.testing.assert_array_equal(to_torch(loaded)["norm.weight"], stored)
