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
from eqx_norm.models._layers import layers_of as found
from tests.compiling import filter_jit
from tests.helpers import copy, over_batch
from tests.models.nested import KEY, NORMS, descended

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore:When `eqx.nn.BatchNorm:UserWarning"),
]

STEPS, CLASSES = 3, 4


def resnet(norm: Any, monkeypatch: Any) -> Any:
    """Returns a ResNet of jaxonmodels with any batch norm, and its state."""
    # The code that fetches its weights needs packages that conflict with the pinned ones.
    fetching = types.SimpleNamespace(BotoClient=None, download=None)
    monkeypatch.setitem(sys.modules, "jaxonmodels.utils.boto_client", fetching)
    # Imported here: without the peers this must fail, and only when it is asked for.
    module = importlib.import_module("jaxonmodels.vision.resnet")
    monkeypatch.setattr(eqx.nn, "BatchNorm", norm)  # it is looked up in each call
    made = eqx.nn.make_with_state(module.ResNet)(
        module.BasicBlock, [1, 1, 1, 1], num_classes=CLASSES, key=KEY
    )
    monkeypatch.undo()
    return made


def transformer(norm: Any, monkeypatch: Any) -> Any:
    """Returns a vision transformer of equimo, of two blocks, and its state."""
    make = importlib.import_module("equimo.models.vit").VisionTransformer
    sizes = {"img_size": 16, "patch_size": 8, "in_channels": 3, "dim": 16, "num_heads": 2}
    return eqx.nn.make_with_state(make)(
        **sizes, depths=[2], num_classes=CLASSES, norm_layer=norm, key=KEY
    )


def forward(model: Any, state: eqx.nn.State, x: Any) -> Any:
    if [*jax.tree.leaves(state)]:
        return over_batch(model)(x, state)
    return jax.vmap(lambda x: model(x, key=KEY))(x), state


step = filter_jit(functools.partial(descended, forward, 0.01))


@filter_jit
def inferred(model: Any, state: eqx.nn.State, x: Any) -> Any:
    return forward(eqx.nn.inference_mode(model), state, x)[0]


def trained(images: Any, model: Any, state: Any) -> Any:
    """Returns the model after some steps, and its outputs before each and at last."""
    outputs, state = [], copy(state)
    for x in images:
        model, state, y = step(model, state, x)
        outputs.append(y)
    return model, [*outputs, inferred(model, state, images[0])]


TRIALS: dict[str, Any] = {
    "resnet": (resnet, eqx.nn.BatchNorm, functools.partial(BatchNorm, mode="ema")),
    "transformer": (transformer, "layernorm", LayerNorm),
}


@pytest.mark.parametrize("name", TRIALS)
def test_it_trains_and_infers_as_published(name, monkeypatch):
    make, theirs, ours = TRIALS[name]
    with jax.enable_x64(True):
        images = jnp.asarray(np.random.RandomState(0).standard_normal((STEPS, 4, 3, 16, 16)))
        original = make(theirs, monkeypatch)
        after, outputs = trained(images, *original)
        right = outputs, eqx.filter(after, eqx.is_inexact_array)
        for made in (make(ours, monkeypatch), swap(*original)):
            model, ys = trained(images, *made)
            norms = found(model, NORMS).values()
            assert {*map(type, norms)} in ({BatchNorm}, {LayerNorm})
            result = ys, eqx.filter(model, eqx.is_inexact_array)
            for a, b in zip(*map(jax.tree.leaves, (result, right)), strict=True):
                np.testing.assert_allclose(a, b, rtol=0, atol=1e-10 * (abs(b).max() + 1e-3))
