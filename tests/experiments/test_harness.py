"""What every experiment promises of its command, its files and its documents."""

import dataclasses
import json
import re
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from experiments import __main__ as every
from experiments.lab import claims, peers
from experiments.lab import experiment as lab
from experiments.lab.claims import Claim, NotMeasured, Verdict
from experiments.lab.experiment import COMMITTED, Experiment, Report, UserError

ROOT = Path(__file__).parents[2]
EXPERIMENTS = {experiment.name: experiment for experiment in every.experiments()}
each = pytest.mark.parametrize("name", EXPERIMENTS)


def committed():
    """Returns every committed result and figure, with its time: whether it was written."""
    files = (*(COMMITTED / "results").iterdir(), *(COMMITTED / "figures").iterdir())
    return {path: path.stat().st_mtime_ns for path in files}


def results(name, out):
    """Copies the committed results of an experiment."""
    (out / "results").mkdir(parents=True, exist_ok=True)
    for path in (COMMITTED / "results").glob(f"{name}*"):
        shutil.copy(path, out / "results")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Runs in an empty folder, with another one for what is committed."""
    before = committed()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(lab, "COMMITTED", tmp_path / "committed")
    yield
    assert committed() == before


@each
def test_every_experiment_says_what_it_is(name):
    experiment = EXPERIMENTS[name]
    assert (COMMITTED / name / "__main__.py").exists()
    assert f"python -m experiments.{name}" in str(experiment.about)
    assert experiment.thread
    assert experiment.stems(COMMITTED)


# --- The command line.


@pytest.mark.parametrize("name", [*EXPERIMENTS, ""])
def test_help_shows_help_and_does_nothing_else(name, capsys, monkeypatch):
    module = f"experiments.{name}".removesuffix(".")
    monkeypatch.setattr(sys, "argv", ["-m", "--help"])
    # It is imported anew, as the main module.
    monkeypatch.delitem(sys.modules, f"{module}.__main__", raising=False)
    with pytest.raises(SystemExit) as exit_:
        runpy.run_module(module, run_name="__main__", alter_sys=False)
    assert exit_.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: python -m {module} ")


def stopped(capsys, experiment, *arguments):
    """Returns what is said where a command is refused."""
    with pytest.raises(SystemExit) as exit_:
        experiment.main(arguments)
    assert exit_.value.code == 2
    return capsys.readouterr().err.replace("\n", " ")


WRONG = {
    "stability --out /dev/null": "/dev/null/results cannot be made.*another folder with --out",
    "stability --data nowhere": "nowhere.*no such folder",
    "stability --steps 0": "--steps: 0: must be 1 or more",
    "stability --seeds one": "--seeds: invalid number value: 'one'",
    "speed --shapes 8,0": "--shapes: '8,0': must be N,C,.*for example 64,64,32,32",
    "speed --peers keras": "invalid choice: 'keras'.*Flax linen",
}


@pytest.mark.parametrize("command", WRONG)
def test_bad_arguments_end_with_a_sentence(command, capsys, tmp_path):
    name, *arguments = command.split()
    assert re.search(WRONG[command], stopped(capsys, EXPERIMENTS[name], *arguments))
    assert not list(tmp_path.rglob("*.csv"))


def unmeasured(name, **changes):
    """Returns the experiment, which says where it would write instead of measuring."""

    def measure(job, files):
        raise UserError(str(files.out))

    return dataclasses.replace(EXPERIMENTS[name], measure=measure, **changes)


def all_present(job):
    return job, {}


@each
def test_a_run_writes_below_build_unless_asked_to_commit(name, capsys, tmp_path):
    run = unmeasured(name, present=all_present)
    assert stopped(capsys, run) == f"build/{name} "
    assert stopped(capsys, run, "--quick") == f"build/{name} "
    assert stopped(capsys, run, "--out", "there") == "there "
    assert not (tmp_path / "committed").exists()
    assert stopped(capsys, run, "--commit") == "committed "


PARTS = [
    *(f"{name} --quick" for name in EXPERIMENTS),
    *("stability --steps 5", "stability --seeds 0", "variance_clipping --data ."),
    *("speed --rounds 5", "speed --peers eqx-norm", "speed --only networks"),
]


@pytest.mark.parametrize("part", PARTS)
def test_only_the_whole_job_replaces_what_is_committed(part, capsys, tmp_path):
    name, *arguments = part.split()
    run = unmeasured(name, present=all_present)
    assert "--commit: the committed results are" in stopped(capsys, run, *arguments, "--commit")
    assert not (tmp_path / "committed").exists()


@pytest.mark.parametrize("name", ["accuracy", "layer_norm", "speed", "state_consistency"])
def test_without_its_peers_an_experiment_replaces_nothing(name, capsys, monkeypatch):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    assert "with every peer" in stopped(capsys, unmeasured(name), "--commit")


@each
def test_a_run_reports_what_it_has_written(name, capsys):
    run = dataclasses.replace(
        EXPERIMENTS[name],
        measure=lambda job, files: results(name, files.out) or {"noted": 3},
        present=lambda job: (job, {"a peer": "not here"}),
    )
    assert run.main([]) == 0
    said = capsys.readouterr().out
    assert "a peer is left out: not here" in said
    figures = re.findall(r"\S+\.png", said)
    assert all(figure.startswith(f"build/{name}/figures") for figure in figures)
    assert all(Path(figure).stat().st_size > 10_000 for figure in figures)
    about = json.loads(Path(f"build/{name}/results/{name}.json").read_text())
    assert (about["noted"], about["left out"]) == (3, {"a peer": "not here"})
    noted = {"processor", "instruction set", "python", "jax", "equinox"}
    assert noted <= set(about["environment"])
    report = run.report(lab.Files(Path("build", name), name))
    assert report.text in said
    assert [claim["claim"] for claim in about["claims"]] == [v.claim for v in report.verdicts]
    assert run.main(["--redraw", "--out", f"build/{name}"]) == 0
    assert report.text in capsys.readouterr().out


@each
def test_without_results_there_is_nothing_to_show(name, capsys):
    said = stopped(capsys, EXPERIMENTS[name], "--redraw", "--out", "there")
    assert "there are no results of" in said


@pytest.mark.long
@pytest.mark.parametrize("name", ["accuracy", "distributed", "layer_norm", "stability"])
def test_quick_holds_every_claim(name, tmp_path, capsys):
    """The quick runs of the others are in their own tests, which look into the results."""
    assert EXPERIMENTS[name].main(["--quick", "--out", str(tmp_path)]) == 0
    claims = json.loads((tmp_path / "results" / f"{name}.json").read_text())["claims"]
    assert all(claim["holds"] for claim in claims)
    assert capsys.readouterr().out.count("| holds") == len(claims)


def test_ctrl_c_ends_a_run_without_a_traceback():
    """While it imports, too, where NumPy and jaxlib cannot bear an exception."""
    # Where tests run in the background, it is ignored, and so it would be in the process.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    command = [sys.executable, "-X", "importtime", "-m", "experiments.stability"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    signal.signal(signal.SIGINT, before)
    assert process.stderr is not None
    said = next(line for line in process.stderr if "numpy." in line)
    process.send_signal(signal.SIGINT)
    said += process.communicate(timeout=120)[1]
    assert process.returncode == -signal.SIGINT  # which a shell sees as 130
    assert "Traceback" not in said


# --- The steps of a run, with an experiment that measures nothing.

YES, NO, NONE = (Verdict(str(holds), "1", holds) for holds in (True, False, None))


@pytest.mark.parametrize(
    ("verdicts", "quick", "whole", "strict"),
    [
        ([YES], 0, 0, 0),
        ([YES, NO], 1, 0, 1),
        ([NONE], 1, 0, 0),
        ([YES, NO._replace(quick=False), NONE._replace(quick=False)], 0, 0, 1),
    ],
)
def test_the_exit_code_says_whether_the_claims_hold(verdicts, quick, whole, strict):
    def report(files):
        return Report("", verdicts)

    run = Experiment("made", "", None, None, lambda job, files: {}, report)
    assert run.main(["--quick"]) == quick
    assert run.main([]) == whole
    assert dataclasses.replace(run, strict=True).main([]) == strict


def test_a_claim_that_cannot_be_judged_is_neither_true_nor_false():
    def nothing(measured):
        raise NotMeasured

    small = Claim("1. small", lambda x: (f"{x}", x < 3))
    judged = claims.judge([small, Claim("2. not here", nothing, quick=False)], 4)
    assert judged == [
        Verdict("1. small", "4", False),
        Verdict("2. not here", "-", None, False),
    ]


# --- Documents.


def test_the_documents_have_the_newest_tables():
    """To renew them: python -m experiments --write."""
    assert every.DOCUMENT.read_text(encoding="utf-8") == every.document()
    readme = every.README.read_text(encoding="utf-8")
    assert readme == every.with_threads(readme)


def test_make_commits_results_only_where_it_is_asked_to():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    recipes = dict(re.findall(r"^([a-z-]+):[^=\n]*\n((?:\t.*\n)+)", makefile, re.MULTILINE))
    for target, recipe in recipes.items():
        commits = re.search(r"-m experiments.*--commit", recipe) is not None
        assert commits == (target == "experiments"), target
    assert "gpu-compile-check COMMIT=--commit" in recipes["experiments"]
    whole = re.findall(r"-m experiments\.(\w+) --commit", recipes["experiments"])
    compiled = re.findall(r"-m experiments\.(\w+) \$\(COMMIT\)", recipes["gpu-compile-check"])
    assert {*whole, *compiled} == set(EXPERIMENTS)
