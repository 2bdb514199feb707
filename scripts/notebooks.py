"""Executes notebooks in place: `python scripts/notebooks.py [FILE ...]`; by default all.

Each notebook runs in a process of its own, from the root of the repository. Times and versions
are left out, so that a notebook changes only where its cells or their results change.
"""

import os
import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
OPTIONS: Any = {
    "coalesce_streams": True,
    "record_timing": False,
    "resources": {"metadata": {"path": str(ROOT)}},
    "timeout": 120,  # seconds for a cell
}

os.environ["PYTHONHASHSEED"] = "0"  # printed by where_two_runs_differ
for path in sys.argv[1:] or sorted(ROOT.glob("notebooks/*.ipynb")):
    print(path, file=sys.stderr)
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, **OPTIONS).execute()
    notebook.metadata.language_info = {"name": "python"}
    nbformat.write(notebook, path)
