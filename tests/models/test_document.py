"""Tests that the code in docs/models.md runs, each block by itself."""

import re

import pytest

from tests.processes import ROOT

TEXT = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
SECTIONS = re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", TEXT, re.DOTALL | re.MULTILINE)
BLOCKS = [
    pytest.param(block, id=heading)
    for heading, text in SECTIONS
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL)
]


@pytest.mark.parametrize("block", BLOCKS)
def test_code_runs(block):
    exec(compile(block, "docs/models.md", "exec"), {"__name__": "models"})
