"""The benchmark's command measures what it says, and says so when a target is missed."""

import csv
import json
import re

import pytest

from experiments import (
    benchmark,
    benchmark_figures,
    benchmark_job,
    benchmark_layers,
    benchmark_runs,
    benchmark_targets,
)
from experiments.benchmark_layers import EQUINOX, OURS
from experiments.benchmark_parts import COPY, PARTS

from .test_benchmark_targets import changed, fabricated


def test_quick_holds_what_does_not_depend_on_the_machine(tmp_path, capsys):
    assert benchmark.main(["--quick", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"\| 1\. f32.*\| holds", printed)
    assert re.search(r"\| 8\. f32.*\| holds", printed)
    with (tmp_path / "results" / "benchmark.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["contestant"] for row in rows} == {OURS, *EQUINOX, PARTS, COPY}
    written = json.loads((tmp_path / "results" / "benchmark.json").read_text())
    assert written["rounds"] == benchmark_job.QUICK.rounds
    assert {"device", "cores", "python", "jax", "equinox"} <= set(written["environment"])
    assert len(written["targets"]) == len(benchmark_targets.TARGETS)
    assert (tmp_path / "figures" / "benchmark.png").stat().st_size > 10_000


def test_a_missed_target_is_printed_as_such(tmp_path, capsys, monkeypatch):
    rows = changed(OURS, temporaries=2.0)
    monkeypatch.setattr(benchmark, "run", lambda job: rows)
    assert benchmark.main(["--quick", "--out", str(tmp_path)]) == 1
    assert benchmark.main(["--only", "time", "--out", str(tmp_path)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line[:4] == "| 8."]
    assert len(lines) == 2
    assert all("2.000 of x's bytes" in line and "DOES NOT HOLD" in line for line in lines)


def test_the_file_holds_all_of_it(tmp_path):
    """The tables and the figure are made from it alone."""
    rows = fabricated()
    benchmark_runs.save(tmp_path / "results" / "benchmark.csv", rows)
    loaded = benchmark_runs.load(tmp_path / "results" / "benchmark.csv")
    assert benchmark.report(loaded) == benchmark.report(rows)
    assert benchmark.report(rows).count("| holds") == len(benchmark_targets.TARGETS)
    drawn = []
    for _ in range(2):
        (path,) = benchmark_figures.draw(tmp_path, "benchmark")
        drawn.append(path.read_bytes())
    assert drawn[0] == drawn[1]
    assert benchmark_runs.merge(rows, rows) == rows


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "64"], "--shapes: '64': must be N,C,.*for example 64,64,32,32"),
        (["--shapes", "8,0"], "--shapes: '8,0': must be N,C"),
        (["--shapes", "big"], "--shapes: 'big': must be N,C"),
        (["--rounds", "0"], "--rounds: 0: must be 1 or more"),
        (["--dtype", "f64"], "--dtype: invalid choice: 'f64'"),
        (["--contestants", "keras"], "--contestants: invalid choice: 'keras'.*flax linen"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_arguments_end_with_a_sentence(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        benchmark.main(["--quick", *arguments])
    assert exit_.value.code == 2
    assert re.search(message, capsys.readouterr().err.replace("\n", " "))


def test_an_output_folder_that_cannot_be_made_is_known_before_the_measuring(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as exit_:
        benchmark.main(["--out", str(tmp_path / "file")])
    assert exit_.value.code == 2
    assert "file/results cannot be made (Not a directory)" in capsys.readouterr().err


def test_what_is_not_installed_is_left_out(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(benchmark, "run", lambda job: fabricated())
    assert benchmark.main(["--only", "time", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "flax linen, flax nnx, torch: not installed here" in said
    assert benchmark_layers.available((OURS, "torch")) == ([OURS], ["torch"])
