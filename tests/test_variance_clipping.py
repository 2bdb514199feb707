"""The variance clipping experiment finds again what it says, and says so when it does not."""

import csv
import json
import re

import jax.numpy as jnp
import numpy as np
import pytest

from experiments import (
    mnist,
    results,
    training,
    variance_clipping,
    variance_clipping_claims,
    variance_clipping_corruptions,
    variance_clipping_runs,
    variance_clipping_tables,
)
from experiments.variance_clipping_claims import FOUND, THREAD
from experiments.variance_clipping_corruptions import (
    CLEAN,
    CONSTANT,
    CONTRAST,
    CORRUPTIONS,
    FAINT,
    LOUD,
    ONE_IMAGE,
    SCALED,
)
from experiments.variance_clipping_figures import DRAWN
from experiments.variance_clipping_network import NETWORKS
from experiments.variance_clipping_runs import CORRUPTED, START, STEPS, Run, Setting


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """The exit code and the folder of the quick job."""
    folder = tmp_path_factory.mktemp("quick")
    return variance_clipping.main(["--quick", "--out", str(folder)]), folder


def test_quick_finds_what_it_says(quick):
    code, folder = quick
    assert code == 0
    with (folder / "results" / "variance_clipping_claims.csv").open() as file:
        holds = {row["claim"]: row["holds"] for row in csv.DictReader(file)}
    assert [holds[claim] for claim in FOUND] == ["True"] * len(FOUND)
    # Both failures are there; clipping prevents neither everywhere.
    assert [holds[claim] for claim in THREAD] == ["True", "True", "False", "False", "False"]
    written = json.loads((folder / "results" / "variance_clipping.json").read_text())
    assert written["seeds"] == [0]
    assert {"device", "python", "jax", "equinox", "optax"} <= set(written["environment"])
    for name in DRAWN.values():
        assert (folder / "figures" / name).stat().st_size > 10_000


def test_the_same_seeds_give_the_same_rows(quick, tmp_path, monkeypatch):
    _, folder = quick
    part = variance_clipping.Job(
        approaches=("batch",), corruptions=(CLEAN, SCALED, ONE_IMAGE), seeds=(0,)
    )
    monkeypatch.setattr(variance_clipping, "QUICK", part)
    variance_clipping.main(["--quick", "--out", str(tmp_path)])
    for name, rows in (("variance_clipping.csv", 6), ("variance_clipping_curves.csv", 705)):
        again = (tmp_path / "results" / name).read_text().splitlines()[1:]
        assert len(again) == rows
        assert set(again) <= set((folder / "results" / name).read_text().splitlines())


def test_until_the_first_corrupted_batch_all_runs_are_alike(quick):
    _, folder = quick
    path = folder / "results" / "variance_clipping_curves.csv"
    curves = variance_clipping_runs.load_curves(path)
    for approach in ("batch", "ema"):
        before, after = [], []
        for setting, of_seeds in curves.items():
            if setting.approach == approach and not setting.clipped:
                steps = of_seeds[0][:, 0]
                before.append(of_seeds[0][steps < CORRUPTED[0]])
                after.append(of_seeds[0][steps >= CORRUPTED[0]])
        assert len(before) == 3
        for i in (1, 2):
            np.testing.assert_array_equal(before[0], before[i])
            assert (after[0] != after[i]).any()


def test_a_change_sees_the_steps_and_a_probe_what_the_step_saw():
    steps = []

    def change(step, images):
        steps.append((step, images.shape))
        return images if step < 3 else np.zeros_like(images)

    def probe(model, state, output, labels):
        wrong = (output.argmax(axis=1) != labels).sum()
        return {"wrong": wrong, "certainty": jnp.exp(output).max()}

    make_norm = variance_clipping.make_norm(Setting("batch", False, CLEAN))
    network, data = NETWORKS["perceptron"], mnist.load()
    plain = training.train(network, make_norm, data, seed=0, steps=4)
    changed = training.train(
        network, make_norm, data, seed=0, steps=4, change=change, probe=probe
    )
    assert steps == [(step, (64, 1, 28, 28)) for step in (1, 2, 3, 4)]
    assert plain.probed == {}
    assert set(changed.probed) == {"wrong", "certainty"}
    assert changed.probed["wrong"].shape == (4,)
    assert (changed.probed["wrong"] % 1 == 0).all()
    assert ((changed.probed["certainty"] > 0.1) & (changed.probed["certainty"] <= 1)).all()
    np.testing.assert_allclose(plain.loss[:2], changed.loss[:2], rtol=1e-6)
    assert (np.abs(plain.loss[2:] - changed.loss[2:]) > 0.1).all()


# What the variance and the mean of the norm's input are multiplied by; None: by anything.
EFFECTS = {
    CLEAN: (1, 1),
    SCALED: (1e6, 1e3),
    CONTRAST: (1e6, 1),
    CONSTANT: (0, None),
    LOUD: (0, None),
    FAINT: (1e-6, 1e-3),
}


@pytest.mark.parametrize("corruption", EFFECTS)
def test_corruptions_do_to_the_norm_s_input_what_they_say(corruption):
    images = mnist.scaled(mnist.load().train.images[:64])
    change = variance_clipping_corruptions.at((5,), corruption)
    assert change(4, images) is images
    corrupted = change(5, images)
    assert (corrupted.dtype, corrupted.shape) == (images.dtype, images.shape)
    weights = np.random.RandomState(0).standard_normal((28 * 28, 8))
    before, after = (
        ((x.reshape(64, -1).astype(np.float64) + 1) / 2) @ weights for x in (images, corrupted)
    )
    variance, mean = EFFECTS[corruption]
    # float32 knows 1e-3 times an image from black, which is -1, to 6e-8 / 1e-3.
    np.testing.assert_allclose(after.var(0) / before.var(0), variance, rtol=1e-3, atol=1e-12)
    if mean is not None:
        np.testing.assert_allclose(after.mean(0) / before.mean(0), mean, rtol=2e-3)


def test_one_image_is_one_image():
    images = mnist.scaled(mnist.load().train.images[:64])
    corrupted = variance_clipping_corruptions.at((5,), ONE_IMAGE)(5, images)
    np.testing.assert_array_equal(corrupted[1:], images[1:])
    assert corrupted[0].max() == pytest.approx(2 * 1000 - 1)
    assert corrupted[0].min() == -1


GOOD = Run(
    loss=0.3,
    gradient=1.0,
    accuracy_after=0.9,
    accuracy_end=0.9,
    test_after=0.9,
    test_end=0.9,
    variance=1.0,
    growth=1.01,
)
A1, A2 = {"gradient": 10.1}, {"accuracy_after": 0.49}
B = {"accuracy_end": 0.89, "test_end": 0.79}


def fabricated(different=None):
    """Everything is fine, but for what `different` says of one approach and corruption.

    What is found here needs some of it to go wrong.
    """
    job = variance_clipping.Job(seeds=(0, 1, 2))
    wrong = {
        ("batch", False, ONE_IMAGE): B,
        ("batch", True, SCALED): A1,
        ("batch", False, LOUD): B,
        ("batch", True, LOUD): B,
        ("ema", False, SCALED): {"growth": 1e4},
        **(different or {}),
    }
    return {
        setting: dict.fromkeys(job.seeds, GOOD._replace(**wrong.get(tuple(setting), {})))
        for setting in job.settings
    }


def verdicts(runs, claims):
    return [verdict.holds for verdict in variance_clipping_claims.judge(runs, claims)]


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
        (B, "B"),
        ({**B, "accuracy_end": 0.87}, ""),  # training does not look fine
        ({**B, "test_end": 0.81}, ""),
        (A1, "A1"),
        ({**A1, **A2}, "A1 A2"),
        ({"gradient": np.nan}, "A1"),
    ],
)
def test_failures_are_those_defined(run, failures):
    text, _, _ = variance_clipping_tables.report(fabricated({("ema", True, FAINT): run}))
    row = next(line for line in text.splitlines() if line.startswith(f"| {FAINT}"))
    assert " ".join(row.split("|")[5].split()[3:]) == failures


def test_a_failure_in_the_minority_of_seeds_is_not_seen():
    runs = fabricated()
    setting = Setting("ema", False, SCALED)
    for bad, seen in ((1, False), (2, True)):
        runs[setting] = {seed: GOOD._replace(**A2 if seed < bad else {}) for seed in range(3)}
        assert (
            variance_clipping_claims.seen(runs, setting, variance_clipping_claims.collapsed)
            is seen
        )


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
def test_what_is_not_found_again_is_printed_as_such(
    setting, run, claim, tmp_path, capsys, monkeypatch
):
    assert verdicts(fabricated(), FOUND) == [True] * 5
    runs = fabricated({setting: run})
    flat = np.ones((3, 1 + len(variance_clipping_runs.QUANTITIES)))
    monkeypatch.setattr(
        variance_clipping, "run", lambda job: (runs, {s: {0: flat} for s in runs})
    )
    monkeypatch.setattr(variance_clipping.variance_clipping_figures, "draw", lambda out: [])
    assert variance_clipping.main(["--quick", "--out", str(tmp_path)]) == 1
    assert variance_clipping.main(["--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out.splitlines()
    wrong = [line for line in printed if line.startswith("| ") and "DOES NOT HOLD" in line]
    assert [
        int(line[2:].split(".")[0]) for line in wrong if int(line[2:].split(".")[0]) > 5
    ] == [claim] * 2


def test_without_runs_there_is_no_verdict():
    for claims in (THREAD, FOUND):
        assert verdicts({}, claims) == [None] * 5


def test_runs_are_read_back_as_they_were_written(tmp_path):
    runs = fabricated({("ema", True, FAINT): {"gradient": 123456.0, "test_end": 0.1 + 0.2}})
    variance_clipping_runs.save(tmp_path / "a.csv", runs)
    again = variance_clipping_runs.load(tmp_path / "a.csv")
    assert list(again) == list(runs)
    for setting, of_seeds in runs.items():
        for seed, run in of_seeds.items():
            np.testing.assert_allclose(again[setting][seed], run, rtol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "nowhere"], "nowhere.*no such folder.*--data download"),
        (["--network", "huge"], "--network: invalid choice: 'huge'.*perceptron"),
    ],
    ids=" ".join,
)
def test_bad_arguments_end_with_a_sentence(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_:
        variance_clipping.main(arguments)
    assert exit_.value.code == 2
    assert re.search(message, capsys.readouterr().err.replace("\n", " "))
    assert not list(tmp_path.rglob("*.csv"))


def test_an_output_folder_that_cannot_be_made_is_known_before_the_training(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as exit_:
        variance_clipping.main(["--out", str(tmp_path / "file")])
    assert exit_.value.code == 2
    assert "file/results cannot be made (Not a directory)" in capsys.readouterr().err


def test_clipping_has_started_when_the_first_batch_is_corrupted():
    assert START < CORRUPTED[0] < CORRUPTED[-1] + variance_clipping_runs.WINDOW < STEPS


def test_the_committed_results_are_of_every_setting_and_seed():
    runs = variance_clipping_runs.load(results.FOLDER / "variance_clipping.csv")
    job = variance_clipping.Job()
    assert list(runs) == job.settings
    assert {tuple(of_seeds) for of_seeds in runs.values()} == {job.seeds}
    assert {setting.corruption for setting in runs} == set(CORRUPTIONS)
    _, thread, found = variance_clipping_tables.report(runs)
    with (results.FOLDER / "variance_clipping_claims.csv").open() as file:
        assert [row["holds"] for row in csv.DictReader(file)] == [
            str(verdict.holds) for verdict in (*thread, *found)
        ]
