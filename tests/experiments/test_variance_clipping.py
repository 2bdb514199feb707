"""The variance clipping experiment corrupts as it says, and judges by the numbers."""

import functools
import json

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.lab import curves, mnist, rows, training
from experiments.lab.experiment import COMMITTED, Files
from experiments.lab.networks import Perceptron
from experiments.variance_clipping.__main__ import EXPERIMENT, Job, make_norm, measure
from experiments.variance_clipping.claims import (
    FOUND,
    by_setting,
)
from experiments.variance_clipping.corruptions import CLEAN, ONE_IMAGE, SCALED, corrupted
from experiments.variance_clipping.runs import (
    CORRUPTED,
    START,
    STEPS,
    WINDOW,
    Run,
    Setting,
    Step,
)


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """Returns the files of the quick job, which fails unless what is found here is found."""
    folder = tmp_path_factory.mktemp("quick")
    assert EXPERIMENT.main(["--quick", "--out", str(folder)]) == 0
    return Files(folder, "variance_clipping")


def test_quick_finds_what_it_says(quick):
    # Both failures are there; clipping prevents neither everywhere.
    thread = [True, True, False, False, False]
    written = json.loads(quick.json.read_text())
    assert [claim["holds"] for claim in written["claims"]] == [*thread, *[True] * len(FOUND)]
    for suffix in ("_scaled", "_one_image"):
        assert quick.figure(suffix).stat().st_size > 10_000


def test_the_same_seeds_give_the_same_rows(quick, tmp_path):
    job = Job(approaches=("batch",), corruptions=(CLEAN, SCALED, ONE_IMAGE), seeds=(0,))
    part = Files(tmp_path, "part")
    measure(job, part)
    for suffix, count in (("", 6), ("_curves", 705)):
        again = part.csv(suffix).read_text().splitlines()[1:]
        assert len(again) == count
        assert set(again) <= set(quick.csv(suffix).read_text().splitlines())


def test_until_the_first_corrupted_batch_all_runs_are_alike(quick):
    found = curves.by_setting(rows.load(quick.csv("_curves"), Step), Setting)
    for approach in ("batch", "ema"):
        runs = [
            np.stack([*run.values()]) for s, run in found.items() if s[:2] == (approach, False)
        ]
        assert len(runs) == 3
        first = int(np.argmax(found[Setting(approach, False, CLEAN)]["step"] == CORRUPTED[0]))
        for other in runs[1:]:
            np.testing.assert_array_equal(runs[0][..., :first], other[..., :first])
            assert (runs[0][..., first:] != other[..., first:]).any()


def test_a_change_sees_the_steps_and_a_probe_what_the_step_saw():
    steps = []

    def change(step, images):
        steps.append((step, images.shape))
        return images if step < 3 else np.zeros_like(images)

    def probe(model, state, output, labels):
        wrong = (output.argmax(axis=1) != labels).sum()
        return {"wrong": wrong, "certainty": jnp.exp(output).max()}

    norm, data = make_norm(Setting("batch", False, CLEAN)), mnist.load()
    run = functools.partial(training.train, Perceptron, norm, data, seed=0, steps=4)
    plain, changed = run().curves, run(change=change, probe=probe).curves
    assert steps == [(step, (64, 1, 28, 28)) for step in (1, 2, 3, 4)]
    assert changed.keys() - plain.keys() == {"wrong", "certainty"}
    assert changed["wrong"].shape == (4,)
    assert (changed["wrong"] % 1 == 0).all()
    assert ((changed["certainty"] > 0.1) & (changed["certainty"] <= 1)).all()
    np.testing.assert_allclose(plain["loss"][:2], changed["loss"][:2], rtol=1e-6)
    assert (np.abs(plain["loss"][2:] - changed["loss"][2:]) > 0.1).all()


@pytest.mark.parametrize(
    ("corruption", "variance", "mean"),  # what they are multiplied by; None: by anything
    [
        ("none", 1, 1),
        ("scaled by 1e3", 1e6, 1e3),
        ("contrast by 1e3", 1e6, 1),
        ("constant", 0, None),
        ("constant 1e3", 0, None),
        ("scaled by 1e-3", 1e-6, 1e-3),
    ],
)
def test_corruptions_do_to_the_norm_s_input_what_they_say(corruption, variance, mean):
    images = mnist.scaled(mnist.load().train.images[:64])
    changed = corrupted(images, corruption)
    assert (changed.dtype, changed.shape) == (images.dtype, images.shape)
    weights = np.random.RandomState(0).standard_normal((28 * 28, 8))
    before, after = (
        ((x.reshape(64, -1).astype(np.float64) + 1) / 2) @ weights for x in (images, changed)
    )
    # float32 knows 1e-3 times an image from black, which is -1, to 6e-8 / 1e-3.
    np.testing.assert_allclose(after.var(0) / before.var(0), variance, rtol=1e-3, atol=1e-12)
    if mean is not None:
        np.testing.assert_allclose(after.mean(0) / before.mean(0), mean, rtol=2e-3)


def test_one_image_is_one_image():
    images = mnist.scaled(mnist.load().train.images[:64])
    changed = corrupted(images, ONE_IMAGE)
    np.testing.assert_array_equal(changed[1:], images[1:])
    assert (changed[0].min(), changed[0].max()) == (-1, pytest.approx(2 * 1000 - 1))


def test_clipping_has_started_when_the_first_batch_is_corrupted():
    assert START < CORRUPTED[0] < CORRUPTED[-1] + WINDOW < STEPS


def test_the_committed_results_are_of_every_setting_and_seed():
    runs = by_setting(rows.load(Files(COMMITTED, "variance_clipping").csv(), Run))
    assert list(runs) == Job().settings
    assert {tuple(run.seed for run in found) for found in runs.values()} == {Job().seeds}
