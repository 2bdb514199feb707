"""Tests the printed and written results, the exit status, and that documents are current."""

import importlib
import json
import signal
import sys

import pytest

import experiments
from experiments import __main__ as every
from experiments.common import report
from experiments.common.experiment import Experiment


def test_missing_package_prints_one_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "optax", None)
    with pytest.raises(SystemExit) as ended:
        importlib.reload(experiments)
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert printed.startswith("experiments: optax is not installed")
    assert printed.count("\n") == 1


@pytest.fixture
def made(monkeypatch, tmp_path):
    """Returns an experiment that writes to `tmp_path`; SIGTERM ends pytest as before."""
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["made", "--out", str(tmp_path)])
    return Experiment("made", None, "")


@pytest.mark.parametrize(("holds", "status"), [(True, 0), (False, 1)])
def test_publish_prints_and_writes_results(holds, status, made, tmp_path, capsys):
    verdicts = [("1. small", "3", True), ("2. large", "4", holds)]
    goals = [("5 times as fast", "4", "the way there")]
    texts = {"asked": "How?", "answer": "so", "tables": [report.table(("a", "b"), [(1, 22)])]}
    assert made.publish(verdicts=verdicts, goals=goals, **texts) == status
    printed = capsys.readouterr().out
    assert printed.count("DOES NOT HOLD") == status
    assert "| a | b  |\n| - | -- |\n| 1 | 22 |" in printed
    written = json.loads((tmp_path / "results" / "made.json").read_text())
    assert written["verdicts"] == [list(verdict) for verdict in verdicts]
    assert {"processor", "cores", "python", "jax"} <= set(written["environment"])


def test_sigterm_ends_a_process_as_sys_exit_does(monkeypatch):
    """So temporary files are removed. 143 is the status of a process that SIGTERM has ended."""
    handlers = {}
    monkeypatch.setattr("signal.signal", handlers.__setitem__)
    Experiment("made", None, "")
    with pytest.raises(SystemExit, match="143"):
        handlers[signal.SIGTERM](signal.SIGTERM, None)


def test_save_csv_cells(made, tmp_path):
    line = ["x", (2, 3), 1 / 3, float("nan"), None, True, 4]
    made.save_csv(list("abcdefg"), [line], part="of", digits=3)
    written = (tmp_path / "results" / "made_of.csv").read_text()
    assert written == "a,b,c,d,e,f,g\nx,2x3,0.333,,,True,4\n"


def test_every_committed_claim_holds():
    for name, result in every.results().items():
        assert all(holds for _, _, holds in result["verdicts"]), name


def test_experiments_readme_has_the_newest_tables():
    """Fails until `python -m experiments` renews the document."""
    assert (every.FOLDER / "README.md").read_text(encoding="utf-8") == every.document()
