"""Tests which arrays `decay_mask` excludes from weight decay, in models and in Optax."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_norm
from eqx_norm.models import decay_mask, freeze, trainable
from tests.compiling import filter_jit
from tests.helpers import random_layer
from tests.models.nested import KEY, C

UNOPTIMISED = True  # compares values: tests/compiling.py


class Own(eqx.nn.Linear):
    """Has a norm and an array of its own, as a user's subclass may."""

    norm: eqx.nn.LayerNorm
    scale: jax.Array

    def __init__(self, key):
        super().__init__(C, C, key=key)
        self.norm, self.scale = eqx_norm.LayerNorm(C), jnp.ones(C)


class Users(eqx.Module):
    weight: jax.Array
    bias: jax.Array
    name: str = "bias"


class Block(eqx.Module):
    linear: eqx.nn.Linear
    norm: eqx.nn.LayerNorm

    def __init__(self, key):
        self.linear, self.norm = eqx.nn.Linear(C, C, key=key), eqx_norm.LayerNorm(C)


def layer(kind: Any, *args: Any, **kwargs: Any) -> Any:
    return random_layer(kind, *args, **kwargs)


def norm(nn: Any, **kwargs: Any) -> Any:
    return eqx.nn.make_with_state(nn.BatchNorm)(C, "batch", mode="batch", **kwargs)[0]


PRELU = eqx.nn.PReLU(0.25)
SUBCLASS: Any = type("Subclass", (eqx_norm.RMSNorm,), {})
BLOCKS = filter_jit(eqx.filter_vmap(Block))(jax.random.split(KEY, 4))
# A part of a model, and the names of its arrays that decay. All others do not.
CASES: dict[str, tuple[Any, list[str]]] = {
    "BatchNorm": (norm(eqx_norm), []),
    "Equinox's BatchNorm": (norm(eqx.nn), []),
    "LayerNorm": ([eqx_norm.LayerNorm(C), eqx.nn.LayerNorm(C)], []),
    "LayerNorm of images": (eqx.nn.LayerNorm((C, 2, 2)), []),
    "GroupNorm": ([eqx_norm.GroupNorm(1, C), eqx.nn.GroupNorm(1, C)], []),
    "InstanceNorm": (eqx_norm.InstanceNorm(C), []),
    "RMSNorm": ([eqx_norm.RMSNorm(C), eqx.nn.RMSNorm(C)], []),
    "subclass": (SUBCLASS(C), []),
    "activation": (norm(eqx_norm, activation=PRELU), [".activation.negative_slope"]),
    "frozen": (freeze(norm(eqx_norm, activation=PRELU)), []),
    "fixed statistics": (freeze(norm(eqx_norm), weights=False), []),
    "Linear": (layer(eqx.nn.Linear, C, C), [".weight"]),
    "no bias": (layer(eqx.nn.Linear, C, C, use_bias=False), [".weight"]),
    "scalar": (layer(eqx.nn.Linear, "scalar", "scalar"), [".weight"]),
    "Conv": (layer(eqx.nn.Conv2d, C, C, 3), [".weight"]),
    "ConvTranspose": (layer(eqx.nn.ConvTranspose1d, C, C, 3), [".weight"]),
    "GRUCell": (layer(eqx.nn.GRUCell, C, C), [".weight_hh", ".weight_ih"]),
    "LSTMCell": (layer(eqx.nn.LSTMCell, C, C), [".weight_hh", ".weight_ih"]),
    "attention": (
        eqx.nn.MultiheadAttention(1, C, use_query_bias=True, use_output_bias=True, key=KEY),
        [f".{name}_proj.weight" for name in ("key", "output", "query", "value")],
    ),
    "Embedding": (layer(eqx.nn.Embedding, 9, C), [".weight"]),
    "PReLU": (PRELU, [".negative_slope"]),
    "stacked blocks": (BLOCKS, [".linear.weight"]),
    "user's modules": ([Users(jnp.ones(C), jnp.ones(C))], ["[0].bias", "[0].weight"]),
    "layer in a layer": (Own(KEY), [".scale", ".weight"]),
    "other leaves": ([1.0, np.arange(3), jnp.arange(3), jax.nn.relu, None], []),
    "complex": ([jnp.ones(C, complex)], ["[0]"]),
}


def decaying(mask: Any) -> list[str]:
    leaves = jax.tree.leaves_with_path(mask)
    assert all(isinstance(leaf, bool) for _, leaf in leaves)
    return sorted(jax.tree_util.keystr(path) for path, leaf in leaves if leaf)


@pytest.mark.parametrize("case", CASES)
def test_only_weights_that_are_not_of_a_norm_decay(case):
    part, expected = CASES[case]
    for tree in (part, eqx.filter(part, eqx.is_inexact_array)):  # a model, and its gradients
        mask = decay_mask(tree)
        assert jax.tree.structure(mask) == jax.tree.structure(tree)
        assert decaying(mask) == expected


OPTIMISERS = {
    "adamw": optax.adamw(0.1, weight_decay=0.1, mask=decay_mask),
    "chain": optax.chain(optax.add_decayed_weights(0.1, decay_mask), optax.sgd(0.1)),
    "masked": optax.masked(optax.adamw(0.1, weight_decay=0.1, mask=decay_mask), trainable),
}


@pytest.mark.parametrize("name", OPTIMISERS)
def test_step_with_gradients_of_0_changes_only_arrays_that_decay(name):
    model = {case: part for case, (part, _) in CASES.items()}
    weights = eqx.filter(model, eqx.is_inexact_array)
    weights = jax.tree.map(lambda a: a + 3, weights)  # no weight is 0
    optimiser = OPTIMISERS[name]

    @filter_jit
    def step(weights):
        gradients = jax.tree.map(jnp.zeros_like, weights)
        updates, _ = optimiser.update(gradients, optimiser.init(weights), weights)
        return eqx.apply_updates(weights, updates)

    after = step(weights)
    changed = jax.tree.map(lambda a, b: bool((a != b).all()), weights, after)
    assert decaying(changed) == decaying(decay_mask(weights)) != []
    kept = jax.tree.map(lambda a, b: bool((a == b).all()), weights, after)
    assert jax.tree.leaves(kept) == [not leaf for leaf in jax.tree.leaves(changed)]
