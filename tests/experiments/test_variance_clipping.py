"""The variance clipping experiment corrupts as it says, and judges by the numbers."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.lab import curves, mnist, rows, training
from experiments.lab.claims import judge
from experiments.lab.experiment import COMMITTED, Files
from experiments.lab.networks import Perceptron
from experiments.variance_clipping.__main__ import EXPERIMENT, Job, make_norm, measure
from experiments.variance_clipping.claims import (
    FAILURES,
    FOUND,
    THREAD,
    by_setting,
    collapsed,
    seen,
)
from experiments.variance_clipping.corruptions import (
    CLEAN,
    CONSTANT,
    CONTRAST,
    FAINT,
    LOUD,
    ONE_IMAGE,
    SCALED,
    corrupted,
)
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
        first = int(np.argmax(found[approach, False, CLEAN]["step"] == CORRUPTED[0]))
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
    plain = training.train(Perceptron, norm, data, seed=0, steps=4).curves
    changed = training.train(
        Perceptron, norm, data, seed=0, steps=4, change=change, probe=probe
    ).curves
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
        (CLEAN, 1, 1),
        (SCALED, 1e6, 1e3),
        (CONTRAST, 1e6, 1),
        (CONSTANT, 0, None),
        (LOUD, 0, None),
        (FAINT, 1e-6, 1e-3),
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
    assert changed[0].max() == pytest.approx(2 * 1000 - 1)
    assert changed[0].min() == -1


GOOD = {
    "loss": 0.3,
    "gradient": 1.0,
    "accuracy_after": 0.9,
    "accuracy_end": 0.9,
    "test_after": 0.9,
    "test_end": 0.9,
    "variance": 1.0,
    "growth": 1.01,
}
A1, A2 = {"gradient": 10.1}, {"accuracy_after": 0.49}
B = {"accuracy_end": 0.89, "test_end": 0.79}


def fabricated(different=None):
    """Returns runs in which all is fine, but for what `different` says of some settings.

    What is found here needs some of it to go wrong.
    """
    wrong = {
        ("batch", False, ONE_IMAGE): B,
        ("batch", True, SCALED): A1,
        ("batch", False, LOUD): B,
        ("batch", True, LOUD): B,
        ("ema", False, SCALED): {"growth": 1e4},
        **(different or {}),
    }
    return by_setting(
        Run(*setting, seed, **{**GOOD, **wrong.get(tuple(setting), {})})
        for setting in Job().settings
        for seed in (0, 1, 2)
    )


def verdicts(runs, claims):
    return [verdict.holds for verdict in judge(claims, runs)]


@pytest.mark.parametrize(
    ("without", "with_", "thread"),
    [
        # A, B, and whether A1, A2 and B are prevented; B is there, and stays, after a constant.
        ({}, {}, [False, True, None, None, False]),
        (A1, {}, [True, True, True, None, False]),
        (A1, A1, [True, True, False, None, False]),
        (A2, {}, [True, True, None, True, False]),
        (A2, A2, [True, True, None, False, False]),
        ({"gradient": np.nan}, {}, [True, True, True, None, False]),
        ({"accuracy_after": np.nan}, {}, [True, True, None, True, False]),
        ({"gradient": 9.9, "accuracy_after": 0.51}, {}, [False, True, None, None, False]),
    ],
)
def test_what_the_thread_says_is_judged_by_the_numbers(without, with_, thread):
    different = {("ema", False, CONTRAST): without, ("ema", True, CONTRAST): with_}
    assert verdicts(fabricated(different), THREAD) == thread


@pytest.mark.parametrize(
    ("run", "failures"),
    [
        (B, ["B"]),
        ({**B, "accuracy_end": 0.87}, []),  # training does not look fine
        ({**B, "test_end": 0.81}, []),
        (A1, ["A1"]),
        ({**A1, **A2}, ["A1", "A2"]),
        ({"gradient": np.nan}, ["A1"]),
    ],
)
def test_failures_are_those_defined(run, failures):
    setting = Setting("ema", True, FAINT)
    runs = fabricated({setting: run})
    assert [
        name for name, failure in FAILURES.items() if seen(runs, setting, failure)
    ] == failures


def test_a_failure_in_the_minority_of_seeds_is_not_seen():
    runs = fabricated()
    setting = Setting("ema", False, SCALED)
    good = runs[setting][0]
    for bad in (1, 2):
        runs[setting] = [good._replace(**A2 if seed < bad else {}) for seed in range(3)]
        assert seen(runs, setting, collapsed) is (bad == 2)


@pytest.mark.parametrize(
    ("setting", "run", "claim"),
    [
        # Growth of the running variance: at most 1 + 7 * 0.01 / (1 - 0.99^100) = 1.1104.
        (("ema", True, SCALED), {"growth": 1.112}, 6),
        (("ema", True, SCALED), {"growth": np.nan}, 6),
        (("ema", False, SCALED), {}, 6),
        (("batch", False, ONE_IMAGE), {}, 7),
        (("batch", True, ONE_IMAGE), {"test_end": 0.79}, 7),
        (("batch", True, SCALED), {}, 8),
        (("batch", False, SCALED), A1, 8),
        (("batch", True, LOUD), {}, 9),
        (("smooth_start", True, CLEAN), {"test_end": 0.88}, 10),
    ],
)
def test_what_is_not_found_again_does_not_hold(setting, run, claim):
    assert verdicts(fabricated(), FOUND) == [True] * 5
    wrong = [v.claim for v in judge(FOUND, fabricated({setting: run})) if not v.holds]
    assert [int(text.split(".")[0]) for text in wrong] == [claim]


def test_without_runs_there_is_no_verdict():
    assert verdicts({}, (*THREAD, *FOUND)) == [None] * 10


def test_clipping_has_started_when_the_first_batch_is_corrupted():
    assert START < CORRUPTED[0] < CORRUPTED[-1] + WINDOW < STEPS


def test_the_committed_results_are_of_every_setting_and_seed():
    runs = by_setting(rows.load(Files(COMMITTED, "variance_clipping").csv(), Run))
    assert list(runs) == Job().settings
    assert {tuple(run.seed for run in found) for found in runs.values()} == {Job().seeds}
