"""Tests that every cell of every notebook runs, in order."""

import json

import matplotlib
import pytest

from tests.processes import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path, monkeypatch):
    matplotlib.use("Agg")
    monkeypatch.setattr("matplotlib.pyplot.show", lambda: None)
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    namespace = {"__name__": "__main__"}
    for number, cell in enumerate(cells):
        if cell["cell_type"] == "code":
            exec(
                compile("".join(cell["source"]), f"{path.name}, cell {number}", "exec"),
                namespace,
            )


def test_there_are_notebooks():
    assert NOTEBOOKS
