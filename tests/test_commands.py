"""A user's run changes nothing that is committed; and every command says what it does."""

import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from experiments import (
    accuracy,
    accuracy_peers,
    benchmark,
    benchmark_layers,
    command,
    determinism,
    determinism_gpu,
    gpu,
    gpu_compile,
    gpu_compiler,
    gpu_kernels,
    gpu_run_device,
    layer_norm,
    processor,
    results,
    stability,
    state_consistency,
    state_consistency_layers,
    variance_clipping,
)
from experiments.accuracy_peers import OURS

from .test_experiments import fabricated

ROOT = Path(__file__).parents[1]
EXPERIMENTS = [
    accuracy,
    benchmark,
    determinism,
    determinism_gpu,
    gpu,
    gpu_compile,
    gpu_kernels,
    layer_norm,
    stability,
    state_consistency,
    variance_clipping,
]
GUARD = '\nif __name__ == "__main__":\n'
COMMANDS = sorted(
    path.stem
    for path in (ROOT / "experiments").glob("*.py")
    if GUARD in path.read_text(encoding="utf-8")
)


def name(experiment):
    return experiment.__name__.rpartition(".")[2]


def committed():
    """Returns every committed result and figure, with its time: whether it was written."""
    files = (*results.FOLDER.iterdir(), *(results.FOLDER.parent / "figures").iterdir())
    return {path: path.stat().st_mtime_ns for path in files}


class AskedError(Exception):
    """Ends an experiment where it asks for the folder to write to."""


@pytest.fixture
def asks(monkeypatch):
    """Returns what an experiment asks for a folder with, everything it needs being there."""
    monkeypatch.setattr(accuracy_peers, "missing", lambda packages: ())
    monkeypatch.setattr(state_consistency, "missing", lambda layers: ())
    monkeypatch.setattr(benchmark_layers, "available", lambda names: (list(names), []))
    monkeypatch.setattr(benchmark.benchmark_torch, "usable", lambda: True)
    monkeypatch.setattr(gpu_compiler, "require_plugin", lambda parser: None)
    monkeypatch.setattr(gpu_run_device, "why_not", lambda device: None)
    monkeypatch.setattr("jax.config.update", lambda name, value: None)
    real = command.folder

    def ask(experiment, *arguments):
        def folder(parser, options, *, whole):
            raise AskedError(real(parser, options, whole=whole))

        monkeypatch.setattr(command, "folder", folder)
        with pytest.raises(AskedError) as asked:
            experiment.main(list(arguments))
        return asked.value.args[0]

    return ask


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=name)
def test_a_run_writes_below_build_unless_asked_to_commit(
    experiment, asks, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(results, "FOLDER", tmp_path / "committed" / "results")
    below = Path("build") / name(experiment)
    assert asks(experiment) == below
    assert asks(experiment, "--quick") == below
    assert asks(experiment, "--out", "elsewhere") == Path("elsewhere")
    assert not (tmp_path / "committed").exists()
    assert asks(experiment, "--commit") == Path("committed")


PARTS = [
    *((experiment, ["--quick"]) for experiment in EXPERIMENTS),
    (stability, ["--steps", "5"]),
    (stability, ["--seeds", "0"]),
    (stability, ["--approach", "ema"]),
    (variance_clipping, ["--network", "small"]),
    (variance_clipping, ["--data", "download"]),
    (benchmark, ["--rounds", "5"]),
    (benchmark, ["--contestants", OURS]),
    (gpu, ["--device", "cpu"]),
    (gpu, ["--part", "layers"]),
    (gpu, ["--dtype", "f32"]),
    (gpu, ["--without", "flax"]),
]


@pytest.mark.parametrize(
    ("experiment", "arguments"), PARTS, ids=[f"{name(e)} {' '.join(a)}" for e, a in PARTS]
)
def test_only_the_whole_job_replaces_what_is_committed(
    experiment, arguments, asks, capsys, tmp_path, monkeypatch
):
    monkeypatch.setattr(results, "FOLDER", tmp_path / "committed" / "results")
    with pytest.raises(SystemExit) as exit_:
        asks(experiment, *arguments, "--commit")
    assert exit_.value.code == 2
    said = capsys.readouterr().err
    assert "--commit: the committed results are those of the whole job" in said
    assert not (tmp_path / "committed").exists()


def test_without_its_peers_an_experiment_replaces_nothing(asks, capsys, monkeypatch):
    monkeypatch.setattr(accuracy_peers, "missing", lambda packages: ("flax", "torch"))
    absent = state_consistency_layers.missing(state_consistency.WHOLE.layers) or ("flax",)
    monkeypatch.setattr(state_consistency, "missing", lambda layers: absent)
    monkeypatch.setattr(benchmark_layers, "available", lambda names: (list(names)[:2], []))
    for experiment in (accuracy, layer_norm, state_consistency, benchmark):
        with pytest.raises(SystemExit):
            asks(experiment, "--commit")
        assert "with every peer" in capsys.readouterr().err


def test_a_whole_run_leaves_the_committed_results_and_says_where_its_own_are(
    tmp_path, capsys, monkeypatch
):
    before = committed()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(stability, "run", lambda job: fabricated({}))
    assert stability.main([]) == 0
    assert committed() == before
    said = capsys.readouterr().out
    assert "results in build/stability/results" in said
    for figure in re.findall(r"\S+\.png", said):
        assert (tmp_path / figure).is_relative_to(tmp_path / "build" / "stability")
        assert (tmp_path / figure).exists()
    about = json.loads((tmp_path / "build/stability/results/stability.json").read_text())
    assert about["environment"]["processor"] == processor.model()
    assert about["environment"]["instruction set"] == processor.instruction_set()
    assert {"python", "jax", "jaxlib", "equinox"} <= set(about["environment"])
    assert about["seconds"] >= 0


def test_make_commits_results_only_where_it_is_asked_to():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    recipes = dict(re.findall(r"^([a-z-]+):[^=\n]*\n((?:\t.*\n)+)", makefile, re.MULTILINE))
    measuring = {name(experiment) for experiment in EXPERIMENTS}
    for target, recipe in recipes.items():
        for module, rest in re.findall(r"-m experiments\.(\w+)\b(.*)", recipe):
            if module in measuring:
                asked = "--commit" in rest
                assert asked == (target == "experiments"), (target, module)
    assert {"stability", "accuracy", "benchmark", "experiments", "gpu"} <= set(recipes)
    assert "gpu-compile-check COMMIT=--commit" in recipes["experiments"]
    every = re.findall(r"-m experiments\.(\w+) --commit", recipes["experiments"])
    compiled = re.findall(r"-m experiments\.(\w+) \$\(COMMIT\)", recipes["gpu-compile-check"])
    assert {*every, *compiled} == measuring - {"gpu"}
    assert "-m experiments.gpu $(COMMIT)" in recipes["gpu"]


@pytest.mark.parametrize("module", COMMANDS)
def test_help_shows_help_and_does_nothing_else(module, capsys, monkeypatch):
    before = committed()
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    # It is imported anew, as the main module.
    monkeypatch.delitem(sys.modules, f"experiments.{module}", raising=False)
    with pytest.raises(SystemExit) as exit_:
        runpy.run_module(f"experiments.{module}", run_name="__main__")
    assert exit_.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: python -m experiments.{module} ")
    assert "--help" in shown
    assert committed() == before


def test_the_drawing_modules_are_among_the_commands():
    drawing = {stem for stem in COMMANDS if stem.endswith(("_figure", "_figures"))}
    assert len(drawing) == 7
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert set(re.findall(r"-m experiments\.(\w+_figures?)", makefile)) == drawing
    assert {name(experiment) for experiment in EXPERIMENTS} <= set(COMMANDS)


def test_a_drawing_module_says_what_is_missing(capsys, tmp_path):
    from experiments import layer_norm_figure, stability_figures

    with pytest.raises(SystemExit) as exit_:
        layer_norm_figure.main(["--out", str(tmp_path)])
    assert exit_.value.code == 2
    assert re.search(r"there is no .*layer_norm_means\.csv to draw", capsys.readouterr().err)
    assert stability_figures.main(["--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"nothing to draw in {tmp_path / 'results'}\n"


CPUINFO = {
    "x86": (
        "processor : 0\ncpu family\t: 6\nmodel\t\t: 143\nmodel name\t: Xeon(R) 8481C\n"
        "flags\t\t: fpu sse4_2 smep avx2 amx_tile avx512f\n\nprocessor : 1\nmodel\t: 7\n",
        "Xeon(R) 8481C (cpu family 6, model 143)",
        ["amx_tile", "avx2", "avx512f", "sse4_2"],
    ),
    "Arm": ("processor : 0\nFeatures : fp asimd sve2 sme\n", None, ["asimd", "sme", "sve2"]),
    "no such file": (None, None, []),
}


@pytest.mark.parametrize("kind", CPUINFO)
def test_the_processor(kind, tmp_path, monkeypatch):
    said, model, vectors = CPUINFO[kind]
    path = tmp_path / "cpuinfo"
    if said is not None:
        path.write_text(said, encoding="utf-8")
    monkeypatch.setattr(processor, "_CPUINFO", path)
    monkeypatch.setattr("platform.processor", lambda: "a processor")
    assert processor.model() == (model or "a processor")
    assert processor.instruction_set().split()[1:] == vectors
    assert processor.instruction_set().split()[0]


def test_git_ignores_what_the_commands_write():
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("this is no checkout")
    for written in ("build/stability/results/stability.csv", ".venv/ready", "dist/a.whl"):
        subprocess.run(["git", "-C", ROOT, "check-ignore", "--quiet", written], check=True)
