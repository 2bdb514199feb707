"""The stability experiment trains the networks that it names, and always alike."""

import equinox as eqx
import jax
import numpy as np
import pytest

from experiments.lab import mnist, rows, training
from experiments.lab.experiment import Files
from experiments.lab.networks import NETWORKS, Small
from experiments.stability.__main__ import EXPERIMENT, Job, gradients, make_norm
from experiments.stability.runs import EMA, NO_NORM, Gradient, Setting, Step
from tests.compiling import filter_jit


def test_the_same_seeds_give_the_same_files(tmp_path):
    """Byte for byte, the figure included."""
    job, written = Job(settings=(EMA, NO_NORM), seeds=(3, 1), steps=3), []
    for folder in (tmp_path / "a", tmp_path / "b"):
        files = Files(folder, "stability")
        EXPERIMENT.measure(job, files)
        paths = files.csv(), files.csv("_gradients"), *EXPERIMENT.draw(files)
        written.append([path.read_bytes() for path in paths])
    assert written[0] == written[1]
    found = dict.fromkeys(row[:3] for row in rows.load(files.csv(), Step))
    assert list(found) == [(*EMA, 3), (*EMA, 1), (*NO_NORM, 3), (*NO_NORM, 1)]


def test_figure_1_is_of_the_seed_with_the_median_peak():
    def norms(peak):
        return {
            "conv.weight": np.array([1, peak], np.float32),
            "conv.bias": np.array([2, 3], np.float32),
        }

    found = list(gradients({EMA: {5: norms(9), 6: norms(7), 7: norms(8)}}))
    assert found == [Gradient(*EMA, 7, 1, "conv", 1, 2), Gradient(*EMA, 7, 2, "conv", 8, 3)]


@pytest.mark.parametrize("network", ["small", "large"])
@pytest.mark.parametrize("setting", [NO_NORM, Setting("smooth_start", 0.9)])
def test_every_network_trains_with_and_without_norm(network, setting, monkeypatch):
    for name in ("step", "_accuracy"):
        compiled = filter_jit(getattr(training, name).__wrapped__)
        monkeypatch.setattr(training, name, compiled)
    data = mnist.load()
    data = data._replace(test=mnist.Split(*(values[:8] for values in data.test)))
    record = training.train(NETWORKS[network], make_norm(setting), data, seed=0, steps=2)
    assert np.isfinite(record.curves["loss"]).all()
    assert any("norm" in name for name in record.gradient_norms) == (setting != NO_NORM)
    largest = np.max([*record.gradient_norms.values()], axis=0)
    np.testing.assert_array_equal(record.curves["largest_gradient_norm"], largest)


def test_the_network_of_the_issue():
    model, _ = eqx.nn.make_with_state(Small)(make_norm(EMA), jax.random.key(0))
    linears = model.linear1, model.linear2, model.linear3
    assert [linear.weight.shape for linear in linears] == [(512, 1728), (64, 512), (10, 64)]
    assert isinstance(model.norm, eqx.nn.BatchNorm)
    assert (training.BATCH_SIZE, Job().steps) == (64, 100)
