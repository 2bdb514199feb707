"""Tests that results are written completely or not at all, and that documents are current."""

import json
from pathlib import Path

import pytest

from experiments import __main__ as every
from experiments.common import report


def test_a_write_that_fails_leaves_earlier_results(tmp_path, capsys):
    def write(number, more):
        """Writes a number to made.csv, then to another file."""
        with report.trouble("made"), report.unfinished(tmp_path) as folder:
            report.save_csv(folder / "results" / "made.csv", ["i"], [[number]])
            report.save_csv(more or folder / "results" / "more.csv", ["i"], [[number]])

    write(1, None)
    with pytest.raises(SystemExit) as ended:
        write(2, Path("/dev/full"))
    assert ended.value.code == 2
    assert capsys.readouterr().err == "made: [Errno 28] No space left on device\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["figures", "results"]
    for name in ("made", "more"):
        assert (tmp_path / "results" / f"{name}.csv").read_text() == "i\n1\n"


def test_what_is_published(tmp_path, capsys):
    verdicts = [("1. small", "3", True), ("2. large", "4", False)]
    goals = [("5 times as fast", "4", "the way there")]
    texts = {"asked": "How?", "answer": "so", "tables": [report.table(("a", "b"), [(1, 22)])]}
    (tmp_path / "results").mkdir()
    fail = report.publish(tmp_path, "made", verdicts=verdicts, goals=goals, **texts)
    said = capsys.readouterr().out
    assert fail == said.count("DOES NOT HOLD") == 1
    assert "| a | b  |\n| - | -- |\n| 1 | 22 |" in said
    written = json.loads((tmp_path / "results" / "made.json").read_text())
    assert written["verdicts"] == [list(verdict) for verdict in verdicts]
    assert {"processor", "instruction set", "python", "jax"} <= set(written["environment"])


def test_csv_cells(tmp_path):
    line = ["x", (2, 3), 1 / 3, float("nan"), None, True, 4]
    report.save_csv(tmp_path / "made.csv", list("abcdefg"), [line], digits=3)
    assert (tmp_path / "made.csv").read_text() == "a,b,c,d,e,f,g\nx,2x3,0.333,,,True,4\n"


def test_every_committed_claim_holds():
    for name, result in every.results().items():
        assert all(holds for _, _, holds in result["verdicts"]), name


def test_the_document_has_the_newest_tables():
    """To renew them: python -m experiments."""
    assert (every.FOLDER / "README.md").read_text(encoding="utf-8") == every.document()
