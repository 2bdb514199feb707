"""Tests that models which others have published work with these layers, in both ways.

A ResNet of jaxonmodels (batch norm) and a vision transformer of equimo (layer norm) are trained
beside themselves: as they are, made with these layers in place of Equinox's, and swapped. They
were written for `eqx.nn`, and their annotations, which jaxonmodels has checked, name its types.
"""

import functools
import importlib
import sys
import types
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm import BatchNorm, LayerNorm
from eqx_norm.models import swap
from tests.compiling import filter_jit
from tests.helpers import bits, copy

pytestmark = pytest.mark.peers

STEPS, RATE, CLASSES = 5, 0.01, 4


@pytest.fixture(autouse=True)
def _in_float64():
    with jax.enable_x64(True):
        yield


@pytest.fixture
def resnet(monkeypatch):
    """Returns how jaxonmodels makes a ResNet, with any batch norm."""
    # What would fetch its weights takes packages that do not go with the pinned ones.
    name = "jaxonmodels.utils.boto_client"
    fetching = types.SimpleNamespace(BotoClient=None, download=None)
    monkeypatch.setitem(sys.modules, name, fetching)
    # Imported here: without the peers this must fail, and only when it is asked for.
    module = importlib.import_module("jaxonmodels.vision.resnet")

    def make(norm: Any) -> tuple[Any, eqx.nn.State]:
        with monkeypatch.context() as patch:
            patch.setattr(eqx.nn, "BatchNorm", norm)  # `module` looks it up in each call
            return eqx.nn.make_with_state(module.ResNet)(
                module.BasicBlock, [1, 1, 1, 1], num_classes=CLASSES, key=jax.random.key(0)
            )

    return make


@pytest.fixture
def transformer():
    """Returns equimo's vision transformer, of two blocks."""
    module = importlib.import_module("equimo.models.vit")

    def make(norm: Any) -> tuple[Any, eqx.nn.State]:
        return eqx.nn.make_with_state(module.VisionTransformer)(
            img_size=16,
            in_channels=3,
            dim=16,
            patch_size=8,
            num_heads=2,
            depths=[2],
            num_classes=CLASSES,
            norm_layer=norm,
            key=jax.random.key(0),
        )

    return make


def with_state(model: Any) -> Any:
    return model


def without_state(model: Any) -> Any:
    """Returns the model of images alone as one that takes a state."""
    return lambda x, state: (model(x, key=jax.random.key(1)), state)


def trained(
    model: Any, state: eqx.nn.State, called: Any
) -> tuple[Any, eqx.nn.State, list[Any]]:
    """Returns the model after some steps, and the outputs before each."""

    def loss(model: Any, state: eqx.nn.State, x: Any) -> Any:
        over = jax.vmap(called(model), axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        y, state = over(x, state)
        return -jax.nn.log_softmax(y)[:, 0].mean(), (y, state)

    @filter_jit
    def step(model: Any, state: eqx.nn.State, x: Any) -> Any:
        by, (y, state) = eqx.filter_grad(loss, has_aux=True)(model, state, x)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -RATE * g, by)), state, y

    random, outputs = np.random.RandomState(0), []
    for _ in range(STEPS):
        model, state, y = step(
            model, state, jnp.asarray(random.standard_normal((4, 3, 16, 16)))
        )
        outputs.append(y)
    return model, state, outputs


@filter_jit
def inferred(model: Any, state: eqx.nn.State, called: Any) -> Any:
    x = jnp.asarray(np.random.RandomState(1).standard_normal((4, 3, 16, 16)))
    over = jax.vmap(
        called(eqx.nn.inference_mode(model)),
        axis_name="batch",
        in_axes=(0, None),
        out_axes=(0, None),
    )
    return over(x, state)[0]


def assert_equal(ours: Any, right: Any) -> None:
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype
        if eqx.is_inexact_array(b):
            scale = float(jnp.abs(b).max()) + 1e-3
            np.testing.assert_allclose(a / scale, b / scale, atol=1e-10)


def check(make: Any, theirs: Any, ours: Any, called: Any, tmp_path: Any) -> None:
    """Trains the model as it was published, and with these layers, in both ways."""
    original, state = make(theirs)
    models = {"imported": make(ours), "swapped": swap(original, state)}
    after, state_after, outputs = trained(original, copy(state), called)
    right = inferred(after, state_after, called)
    for way, (model, fresh) in models.items():
        kinds = [n for n in jax.tree.leaves(model, is_leaf=is_norm) if is_norm(n)]
        assert kinds, way
        assert all(isinstance(norm, BatchNorm | LayerNorm) for norm in kinds), way
        model, trained_state, ys = trained(model, copy(fresh), called)
        assert_equal(ys, outputs)
        assert_equal(eqx.filter(model, eqx.is_array), eqx.filter(after, eqx.is_array))
        y = inferred(model, trained_state, called)
        assert_equal(y, right)
        # Saved, and loaded into a model that was never trained, made the other way.
        path = tmp_path / f"{way}.eqx"
        eqx.tree_serialise_leaves(path, (model, trained_state))
        other = models["imported" if way == "swapped" else "swapped"]
        loaded = eqx.tree_deserialise_leaves(path, other)
        assert bits(inferred(*loaded, called)) == bits(y)


def is_norm(node: Any) -> bool:
    return isinstance(node, eqx.nn.BatchNorm | eqx.nn.LayerNorm)


@pytest.mark.filterwarnings("ignore:When `eqx.nn.BatchNorm:UserWarning")
def test_resnet(resnet, tmp_path):
    """As it was published, with the default of Equinox, `mode="ema"`."""
    ours = functools.partial(BatchNorm, mode="ema")
    check(resnet, eqx.nn.BatchNorm, ours, with_state, tmp_path)


def test_transformer(transformer, tmp_path):
    check(transformer, "layernorm", LayerNorm, without_state, tmp_path)
