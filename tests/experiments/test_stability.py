"""The stability experiment trains what it says, and judges its claims by the numbers."""

import equinox as eqx
import jax
import numpy as np
import pytest

from experiments.lab import mnist, rows, training
from experiments.lab.networks import NETWORKS, Small
from experiments.stability.__main__ import EXPERIMENT, Job, gradients, make_norm
from experiments.stability.runs import Gradient, Setting, Step
from tests.compiling import filter_jit


def test_the_same_seeds_give_the_same_files(tmp_path):
    """Byte for byte, the figure included."""
    small = ["--approach", "ema", "none", "--seeds", "3", "1", "--steps", "3"]
    written = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        assert EXPERIMENT.main([*small, "--out", str(folder)]) == 0
        files = [file for file in folder.rglob("*.*") if file.suffix != ".json"]
        written.append({file.name: file.read_bytes() for file in files})
    assert written[0] == written[1]
    assert set(written[0]) == {
        "stability.csv",
        "stability_gradients.csv",
        "stability_3_seeds.png",
    }
    found = rows.load(tmp_path / "a" / "results" / "stability.csv", Step)
    assert list(dict.fromkeys(row[:3] for row in found)) == [
        *(("ema", 0.99, 3), ("ema", 0.99, 1)),
        *(("none", 0.0, 3), ("none", 0.0, 1)),
    ]


def test_figure_1_is_of_the_seed_with_the_median_peak():
    def norms(peak):
        return {
            "conv.weight": np.array([1, peak], np.float32),
            "conv.bias": np.array([2, 3], np.float32),
        }

    ema = Setting("ema", 0.99)
    found = list(gradients({ema: {5: norms(9), 6: norms(7), 7: norms(8)}}))
    assert found == [Gradient(*ema, 7, 1, "conv", 1, 2), Gradient(*ema, 7, 2, "conv", 8, 3)]


@pytest.mark.parametrize("network", ["small", "large"])
def test_every_network_trains_with_and_without_norm(network, monkeypatch):
    for name in ("step", "_accuracy"):
        compiled = filter_jit(getattr(training, name).__wrapped__)
        monkeypatch.setattr(training, name, compiled)
    data = mnist.load()
    data = data._replace(test=mnist.Split(*(values[:8] for values in data.test)))
    for norm in (Setting("none", 0.0), Setting("smooth_start", 0.9)):
        record = training.train(NETWORKS[network], make_norm(norm), data, seed=0, steps=2)
        assert {len(norms) for norms in record.gradient_norms.values()} == {2}
        assert np.isfinite(record.curves["loss"]).all()
        before, after = record.curves["test_accuracy"]
        assert np.isnan(before)
        assert 0 <= after <= 1
        assert any("norm" in name for name in record.gradient_norms) == (
            norm.approach != "none"
        )
        largest = np.max([*record.gradient_norms.values()], axis=0)
        np.testing.assert_array_equal(record.curves["largest_gradient_norm"], largest)


def test_the_network_of_the_issue():
    model, _ = eqx.nn.make_with_state(Small)(make_norm(Setting("ema", 0.99)), jax.random.key(0))
    assert model.linear1.weight.shape == (512, 1728)
    assert model.linear2.weight.shape == (64, 512)
    assert model.linear3.weight.shape == (10, 64)
    assert isinstance(model.norm, eqx.nn.BatchNorm)
    assert training.BATCH_SIZE == 64
    assert Job().steps == 100
