"""Finds the programs in documents and docstrings, and runs them as a user does."""

import re
import runpy
from pathlib import Path
from typing import Any


def programs_in(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def run(program: str, folder: Path, **names: Any) -> dict[str, Any]:
    """Runs a program as a file in `folder`, with the given names; returns all its names."""
    path = folder / "program.py"
    path.write_text(program, encoding="utf-8")
    return runpy.run_path(str(path), names)
