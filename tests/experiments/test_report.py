"""Tests the printed and written results, the exit status, and that documents are current."""

import importlib
import json
import os
import subprocess
import sys

import pytest

import experiments
from experiments import __main__ as every
from experiments.common import report
from tests.processes import ROOT


@pytest.mark.parametrize("name", ["matplotlib", "optax", "tqdm"])
def test_missing_package_prints_one_line(name, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SystemExit) as ended:
        importlib.reload(experiments)
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"experiments: {name} is not installed")
    assert printed.count("\n") == 1


@pytest.mark.parametrize(("holds", "status"), [(True, 0), (False, 1)])
def test_publish_prints_and_writes_results(holds, status, tmp_path, capsys):
    verdicts = [("1. small", "3", True), ("2. large", "4", holds)]
    goals = [("5 times as fast", "4", "the way there")]
    texts = {"asked": "How?", "answer": "so", "tables": [report.table(("a", "b"), [(1, 22)])]}
    assert report.publish(tmp_path, "made", verdicts=verdicts, goals=goals, **texts) == status
    printed = capsys.readouterr().out
    assert printed.count("DOES NOT HOLD") == status
    assert "| a | b  |\n| - | -- |\n| 1 | 22 |" in printed
    written = json.loads((tmp_path / "results" / "made.json").read_text())
    assert written["verdicts"] == [list(verdict) for verdict in verdicts]
    assert {"processor", "cores", "python", "jax"} <= set(written["environment"])


# Runs like an experiment that has not yet written its results.
UNFINISHED = """
import tempfile, time
from experiments.common import report

report.parser("made", None, "").parse_args([])
with tempfile.TemporaryDirectory():
    print("started", flush=True)
    time.sleep(60)
"""


def test_sigterm_leaves_no_temporary_files(tmp_path):
    command, variables = [sys.executable, "-c", UNFINISHED], {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, **variables}, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout
        assert process.stdout.readline() == b"started\n"
        process.terminate()
    assert process.returncode == 143  # as shells report a process that SIGTERM has ended
    assert not [*tmp_path.iterdir()]


def test_save_csv_cells(tmp_path):
    line = ["x", (2, 3), 1 / 3, float("nan"), None, True, 4]
    report.save_csv(tmp_path, "made", list("abcdefg"), [line], digits=3)
    written = (tmp_path / "results" / "made.csv").read_text()
    assert written == "a,b,c,d,e,f,g\nx,2x3,0.333,,,True,4\n"


def test_every_committed_claim_holds():
    for name, result in every.results().items():
        assert all(holds for _, _, holds in result["verdicts"]), name


def test_experiments_readme_has_the_newest_tables():
    """Fails until `python -m experiments` renews the document."""
    assert (every.FOLDER / "README.md").read_text(encoding="utf-8") == every.document()
