"""Tests that jax2onnx exports models, and that ONNX Runtime computes the same outputs."""

import importlib

import equinox as eqx
import jax
import numpy as np
import pytest
from jax.interpreters import batching

from eqx_norm import LayerNorm
from eqx_norm.models import fold_pairs, propose_pairs, unswap
from tests.documents import programs_in, run
from tests.helpers import normal, over_batch
from tests.models.nested import KEY
from tests.models.test_torch_peers import resnet18
from tests.processes import ROOT

# Warnings at the import of the two packages are not ours.
pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]


def check(function, x, monkeypatch):
    """Checks that ONNX Runtime computes what JAX computes; returns the number of operations."""
    # jax lacks `not_mapped`, which was always None. To be removed with a jax2onnx after 0.13
    # that does not use it.
    monkeypatch.setattr(batching, "not_mapped", None, raising=False)
    # Imported here: without the peers only these tests fail, and only if selected.
    onnxruntime, jax2onnx = map(importlib.import_module, ("onnxruntime", "jax2onnx"))
    model = jax2onnx.to_onnx(function, [x.shape], model_name="model")
    session = onnxruntime.InferenceSession(model.SerializeToString())
    (y,) = session.run(None, {session.get_inputs()[0].name: np.asarray(x)})
    np.testing.assert_allclose(y, function(x), atol=1e-5)
    return len(model.graph.node)


def test_exported_folded_resnet18_has_an_operation_for_each_layer(monkeypatch):
    """Tests the numbers in `docs/serving.md`."""
    model, state = resnet18(monkeypatch)
    model, x = eqx.nn.inference_mode(model), normal(1, (1, 3, 32, 32))
    folded, left = fold_pairs(model, state, propose_pairs(model))
    assert check(lambda x: over_batch(folded)(x, left)[0], x, monkeypatch) == 49
    assert check(lambda x: over_batch(model)(x, state)[0], x, monkeypatch) > 750


def test_code_of_the_page_on_serving_runs(tmp_path):
    """Runs all code of the page; `tests/house` leaves out code that needs flatbuffers."""
    text = ROOT.joinpath("docs", "serving.md").read_text(encoding="utf-8")
    run("\n".join(programs_in(text)), tmp_path)


def test_export_of_layer_norms_by_unswap(monkeypatch):
    """Tests the advice of `docs/models.md` for `LayerNorm`, whose inference has passes, too."""
    ours = eqx.nn.Sequential([LayerNorm(16), eqx.nn.MLP(16, 16, 32, 1, jax.nn.gelu, key=KEY)])
    theirs, _ = unswap(ours, eqx.nn.State(()))
    check(jax.vmap(theirs), normal(1, (2, 16)), monkeypatch)
