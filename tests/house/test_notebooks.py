"""Tests that every cell of every notebook runs, in order."""

import json

import matplotlib
import pytest

from tests.processes import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
assert NOTEBOOKS


@pytest.mark.long
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path, monkeypatch):
    matplotlib.use("Agg")
    monkeypatch.setattr("matplotlib.pyplot.show", lambda: None)
    namespace = {"__name__": "__main__"}
    for number, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"]):
        if cell["cell_type"] == "code":
            name = f"{path.name}, cell {number}"
            exec(compile("".join(cell["source"]), name, "exec"), namespace)
