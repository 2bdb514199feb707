"""What every experiment promises of its command, its files and its documents."""

import dataclasses
import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from experiments import __main__ as every
from experiments.lab import claims, environment, peers
from experiments.lab import experiment as lab
from experiments.lab.claims import Claim, NotMeasured, Verdict
from experiments.lab.experiment import COMMITTED, Experiment, Report, UserError

ROOT = Path(__file__).parents[2]
EXPERIMENTS = list(every.experiments())
BY_NAME = {experiment.name: experiment for experiment in EXPERIMENTS}
NAMES = sorted(BY_NAME)


def committed():
    """Returns every committed result and figure, with its time: whether it was written."""
    files = (*(COMMITTED / "results").iterdir(), *(COMMITTED / "figures").iterdir())
    return {path: path.stat().st_mtime_ns for path in files}


def results(name, out):
    """Copies the committed results of an experiment; they say all that it reports."""
    (out / "results").mkdir(parents=True, exist_ok=True)
    for path in (COMMITTED / "results").glob(f"{name}*"):
        shutil.copy(path, out / "results")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Runs in an empty folder, beside a copy of the committed results."""
    before = committed()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(lab, "COMMITTED", tmp_path / "committed")
    yield
    assert committed() == before


def test_these_are_the_experiments():
    folders = {path.parent.name for path in COMMITTED.glob("*/__main__.py")}
    assert set(NAMES) == folders
    for name, experiment in BY_NAME.items():
        assert experiment.about is not None
        assert experiment.thread
        assert f"python -m experiments.{name}" in experiment.about
        assert experiment.stems(COMMITTED), name


# --- The command line.


@pytest.mark.parametrize("name", [*NAMES, "lab.subset", ""])
def test_help_shows_help_and_does_nothing_else(name, capsys, monkeypatch):
    module = ".".join(filter(None, ("experiments", name)))
    monkeypatch.setattr(sys, "argv", ["-m", "--help"])
    # It is imported anew, as the main module.
    monkeypatch.delitem(sys.modules, f"{module}.__main__", raising=False)
    monkeypatch.delitem(sys.modules, module if "." in name else "", raising=False)
    with pytest.raises(SystemExit) as exit_:
        runpy.run_module(module, run_name="__main__", alter_sys=False)
    assert exit_.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: python -m {module} ")


WRONG = [
    ("stability --data nowhere", "nowhere.*no such folder.*--data download"),
    ("stability --steps 0", "--steps: 0: must be 1 or more"),
    ("stability --seeds -1", "--seeds: -1: must be 0 or more"),
    ("stability --seeds one", "--seeds: invalid number value: 'one'"),
    ("speed --shapes 64", "--shapes: '64': must be N,C,.*for example 64,64,32,32"),
    ("speed --shapes 8,0", "--shapes: '8,0': must be N,C"),
    ("speed --shapes big", "--shapes: 'big': must be N,C"),
    ("speed --rounds 0", "--rounds: 0: must be 1 or more"),
    ("speed --dtype f64", "--dtype: invalid choice: 'f64'"),
    ("speed --peers keras", "--contestants: invalid choice: 'keras'.*Flax linen"),
    ("speed --device tpu", "--device: invalid choice: 'tpu'"),
    ("speed --only speed", "--only: invalid choice: 'speed'"),
]


@pytest.mark.parametrize(("command", "says"), WRONG, ids=[command for command, _ in WRONG])
def test_bad_arguments_end_with_a_sentence(command, says, capsys, tmp_path):
    name, *arguments = command.split()
    with pytest.raises(SystemExit) as exit_:
        BY_NAME[name].main(arguments)
    assert exit_.value.code == 2
    assert re.search(says, capsys.readouterr().err.replace("\n", " "))
    assert not list(tmp_path.rglob("*.csv"))


class AskedError(Exception):
    """Ends an experiment where it starts to measure."""


def asked(experiment, *arguments, everything=True):
    """Returns the folder to which such a run writes."""

    def measure(job, files):
        raise AskedError(files.out)

    changes = {"present": lambda job: (job, {})} if everything else {}
    with pytest.raises(AskedError) as error:
        dataclasses.replace(experiment, measure=measure, **changes).main(arguments)
    return error.value.args[0]


@pytest.mark.parametrize("name", NAMES)
def test_a_run_writes_below_build_unless_asked_to_commit(name, tmp_path):
    experiment = BY_NAME[name]
    assert asked(experiment) == Path("build", name)
    assert asked(experiment, "--quick") == Path("build", name)
    assert asked(experiment, "--out", "there") == Path("there")
    assert not (tmp_path / "committed").exists()
    assert asked(experiment, "--commit") == Path("committed")


PARTS = [
    *((name, ["--quick"]) for name in NAMES),
    ("stability", ["--steps", "5"]),
    ("stability", ["--seeds", "0"]),
    ("variance_clipping", ["--data", "download"]),
    ("speed", ["--rounds", "5"]),
    ("speed", ["--peers", "eqx-norm"]),
    ("speed", ["--only", "stack"]),
]


@pytest.mark.parametrize(
    ("name", "arguments"), PARTS, ids=[f"{n} {' '.join(a)}" for n, a in PARTS]
)
def test_only_the_whole_job_replaces_what_is_committed(name, arguments, capsys, tmp_path):
    with pytest.raises(SystemExit) as exit_:
        asked(BY_NAME[name], *arguments, "--commit")
    assert exit_.value.code == 2
    assert "--commit: the committed results are those of the whole" in capsys.readouterr().err
    assert not (tmp_path / "committed").exists()


@pytest.mark.parametrize("name", ["accuracy", "layer_norm", "speed", "state_consistency"])
def test_without_its_peers_an_experiment_replaces_nothing(name, capsys, monkeypatch):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        asked(BY_NAME[name], "--commit", everything=False)
    said = capsys.readouterr()
    assert "is left out: " in said.out
    assert "with every peer" in said.err


@pytest.mark.parametrize("name", NAMES)
def test_a_run_reports_what_it_has_written(name, tmp_path, capsys):
    run = dataclasses.replace(
        BY_NAME[name],
        measure=lambda job, files: results(name, files.out) or {"noted": 3},
        present=lambda job: (job, {"a peer": "not here"}),
    )
    assert run.main([]) == 0
    said = capsys.readouterr().out
    assert "a peer is left out: not here" in said
    assert f"results in build/{name}/results" in said
    for figure in re.findall(r"\S+\.png", said):
        assert Path(figure).is_relative_to(f"build/{name}/figures")
        assert Path(figure).stat().st_size > 10_000
    about = json.loads(Path(f"build/{name}/results/{name}.json").read_text())
    assert (about["noted"], about["left out"]) == (3, {"a peer": "not here"})
    assert about["seconds"] >= 0
    assert about["claims"]
    noted = {"processor", "instruction set", "python", "jax", "equinox"}
    assert noted <= set(about["environment"])


@pytest.mark.parametrize("name", NAMES)
def test_results_are_shown_again(name, tmp_path, capsys):
    experiment = BY_NAME[name]
    results(name, tmp_path)
    assert experiment.main(["--redraw", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    for stem in experiment.stems(tmp_path):
        report = experiment.report(lab.Files(tmp_path, stem))
        assert report.text in said
        assert all(verdict.claim in said for verdict in report.verdicts)


def test_without_results_there_is_nothing_to_show(tmp_path, capsys):
    for experiment in EXPERIMENTS:
        with pytest.raises(SystemExit) as exit_:
            experiment.main(["--redraw", "--out", str(tmp_path)])
        assert exit_.value.code == 2
        assert "there are no results of" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["accuracy", "layer_norm", "stability"])
def test_quick_holds_every_claim(name, tmp_path, capsys):
    """The quick runs of the others are in their own tests, which look into the results."""
    assert BY_NAME[name].main(["--quick", "--out", str(tmp_path)]) == 0
    claims = json.loads((tmp_path / "results" / f"{name}.json").read_text())["claims"]
    assert all(claim["holds"] for claim in claims)
    assert capsys.readouterr().out.count("| holds") == len(claims)
    for figure in (tmp_path / "figures").iterdir():
        assert figure.stat().st_size > 10_000


# --- The steps of a run, with an experiment that measures nothing.


def made(*verdicts, **changes):
    def measure(job, files):
        files.csv().write_text(str(job))
        return {}

    def report(files):
        return Report(files.csv().read_text(), verdicts)

    fields = {"name": "made", "about": "A docstring.", "thread": "", "whole": 1, "quick": 0}
    return Experiment(**{**fields, "measure": measure, "report": report, **changes})


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
    assert made(*verdicts).main(["--quick"]) == quick
    assert made(*verdicts).main([]) == whole
    assert made(*verdicts, strict=True).main([]) == strict


def test_what_the_user_can_mend_is_one_line(tmp_path, capsys):
    def measure(job, files):
        raise UserError("this file is missing; that mends it")

    (tmp_path / "file").touch()
    for run, arguments, said in (
        (made(measure=measure), [], "this file is missing; that mends it\n"),
        (made(), ["--out", "file"], "name another folder with --out\n"),
    ):
        with pytest.raises(SystemExit) as exit_:
            run.main(arguments)
        assert exit_.value.code == 2
        assert capsys.readouterr().err.endswith(said)


def test_a_claim_that_cannot_be_judged_is_neither_true_nor_false():
    def nothing(measured):
        raise NotMeasured

    small = Claim("1. small", lambda x: (f"{x}", x < 3))
    several = (small, Claim("2. not here", nothing, quick=False))
    assert claims.judge(several, 4) == [
        Verdict("1. small", "4", False),
        Verdict("2. not here", "-", None, False),
    ]
    assert claims.verdicts_table(claims.judge(several, 4)).splitlines()[2:] == [
        "| 1. small    | 4        | DOES NOT HOLD |",
        "| 2. not here | -        | not measured  |",
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
        for module, rest in re.findall(r"-m experiments\.(\w+)\b(.*)", recipe):
            if module in NAMES:
                assert ("--commit" in rest) == (target == "experiments"), (target, module)
    assert {"stability", "accuracy", "benchmark", "experiments", "gpu"} <= set(recipes)
    assert "gpu-compile-check COMMIT=--commit" in recipes["experiments"]
    whole = re.findall(r"-m experiments\.(\w+) --commit", recipes["experiments"])
    compiled = re.findall(r"-m experiments\.(\w+) \$\(COMMIT\)", recipes["gpu-compile-check"])
    assert {*whole, *compiled} == set(NAMES)


def test_git_ignores_what_the_commands_write():
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("this is no checkout")
    for written in ("build/stability/results/stability.csv", ".venv/ready", "dist/a.whl"):
        subprocess.run(["git", "-C", ROOT, "check-ignore", "--quiet", written], check=True)


# --- What results were measured with.

X86 = """\
processor : 0
cpu family\t: 6
model\t\t: 143
model name\t: Xeon(R) 8481C
flags\t\t: fpu sse4_2 smep avx2 amx_tile avx512f

processor : 1
model\t: 7
"""


@pytest.mark.parametrize(
    ("said", "model", "vectors"),
    [
        (X86, "Xeon(R) 8481C (cpu family 6, model 143)", "amx_tile avx2 avx512f sse4_2"),
        ("processor : 0\nFeatures : fp asimd sve2 sme\n", "a processor", "asimd sme sve2"),
        (None, "a processor", ""),
    ],
    ids=["x86", "Arm", "no such file"],
)
def test_the_processor(said, model, vectors, tmp_path, monkeypatch):
    path = tmp_path / "cpuinfo"
    if said is not None:
        path.write_text(said, encoding="utf-8")
    monkeypatch.setattr(environment, "_CPUINFO", path)
    monkeypatch.setattr("platform.processor", lambda: "a processor")
    assert environment.processor() == model
    architecture, *found = environment.instruction_set().split()
    assert architecture
    assert " ".join(found) == vectors
