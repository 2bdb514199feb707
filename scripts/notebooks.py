"""Executes notebooks in place: `python scripts/notebooks.py [NAME ...]`; by default all.

It needs the `dev` extra, nbclient and ipykernel. whole_models also uses PyTorch if it is
installed. Each notebook runs in its own process, from the root of the repository. Only text and
pictures are kept, without times and versions, so a notebook changes only where its cells or
their results change.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOKS = {path.stem: path for path in sorted((ROOT / "notebooks").glob("*.ipynb"))}
SECONDS = 120  # for a cell; tests/house/test_notebooks.py allows as much for a notebook
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
SHOWN = ("image/png", "text/plain")  # the kinds of output that are kept


def execute(path: Path) -> None:
    """Executes one notebook and writes it back."""
    notebook = nbformat.read(path, as_version=4)
    options: Any = {"timeout": SECONDS, "resources": {"metadata": {"path": str(ROOT)}}}
    NotebookClient(notebook, kernel_name="python3", coalesce_streams=True, **options).execute()
    notebook.metadata = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    for number, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{number}", {}
        if cell.cell_type == "code":
            place = f"{path.name}, cell {number}"
            cell.outputs = [kept(output, place) for output in cell.outputs]
    nbformat.validate(notebook)
    nbformat.write(notebook, path)


def kept(output: Any, place: str) -> Any:
    """Returns an output with its text and picture only; exits if it was written to stderr."""
    if output.output_type == "stream" and output.name == "stderr":
        raise SystemExit(f"{place} writes to stderr; fix what warns:\n{output.text}")
    if "data" in output:
        output.data = {kind: output.data[kind] for kind in SHOWN if kind in output.data}
        output.metadata = {}
    return output


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"one of {', '.join(NOTEBOOKS)}"
    )
    names = parser.parse_args().names or [*NOTEBOOKS]
    if unknown := ", ".join(sorted(set(names) - set(NOTEBOOKS))):
        parser.error(f"notebooks/ has no {unknown}; it has {', '.join(NOTEBOOKS)}")
    os.environ["PYTHONHASHSEED"] = "0"  # printed by where_two_runs_differ
    for name in names:
        print(name, file=sys.stderr)
        execute(NOTEBOOKS[name])


if __name__ == "__main__":
    main()
