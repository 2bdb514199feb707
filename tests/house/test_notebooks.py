"""Tests that notebooks run in time and keep their outputs. `make docs` checks their links."""

import json
import re
import subprocess
import sys

import pytest

from tests.processes import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
assert NOTEBOOKS
SECONDS = 120  # for a whole notebook

# Runs the cells of one notebook; pictures are drawn and not shown.
RUN = """
import json, pathlib, sys
import matplotlib
matplotlib.use("Agg")
import matplotlib.pyplot
matplotlib.pyplot.show = lambda: None
path = pathlib.Path(sys.argv[1])
namespace = {"__name__": "__main__"}
for number, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"]):
    if cell["cell_type"] == "code":
        name = f"{path.name}, cell {number}"
        exec(compile("".join(cell["source"]), name, "exec"), namespace)
"""

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def cells(path, kind):
    found = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in found if cell["cell_type"] == kind]


@pytest.mark.long
@every_notebook
def test_runs_in_a_process_of_its_own(path):
    command = [sys.executable, "-W", "error", "-c", RUN, str(path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    assert ended.returncode == 0, ended.stderr
    assert not ended.stderr, ended.stderr


@every_notebook
def test_outputs_are_kept(path):
    code = cells(path, "code")
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert any("image/png" in output.get("data", ()) for output in outputs)
    for output in outputs:
        assert output["output_type"] in ("stream", "execute_result", "display_data")
        assert output.get("name", "stdout") == "stdout"
        data = output.get("data", {})
        assert set(data) <= {"text/plain", "image/png"}
        text = "".join([*output.get("text", ()), *data.get("text/plain", ())])
        assert not re.search(r"(?<![\w.])/(home|root|tmp|Users|work|usr)/", text), text
        assert not re.search(r"\d (ms|s|seconds)\b| at 0x[0-9a-f]+", text), text


@every_notebook
def test_only_what_a_reader_sees_is_kept(path):
    """So that executing a notebook again changes only what its cells compute."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert set(notebook["metadata"]) == {"kernelspec", "language_info"}
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    assert notebook["metadata"]["language_info"] == {"name": "python"}
    for number, cell in enumerate(notebook["cells"]):
        assert (cell["id"], cell["metadata"]) == (f"cell-{number}", {})
