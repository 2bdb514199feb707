"""Tests that code in the documents runs, and that what they name and measure exists.

`make docs` checks links and anchors, when it builds the site.
"""

import importlib
import re
from types import ModuleType

import pytest

from tests.processes import ROOT

DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
DOCUMENTS += [ROOT / "strategies" / "README.md", ROOT / "experiments" / "README.md"]


def text_of(name):
    return (ROOT / name).read_text(encoding="utf-8")


def programs():
    """Yields a name and the code of each section; in the API, also of each public name."""
    for path in sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md")]):
        document = str(path.relative_to(ROOT))
        for section in re.split(r"^(?:## |::: )", text_of(document), flags=re.MULTILINE)[1:]:
            heading, _, text = section.partition("\n")
            code = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
            # That one comes before JAX starts: tests/determinism/test_recipe.py.
            if code and "deterministic(" not in code:
                yield f"{document}, {heading}", code


PROGRAMS = dict(programs())


@pytest.mark.parametrize(
    "name",
    [
        name if name.startswith("README") else pytest.param(name, marks=pytest.mark.long)
        for name in PROGRAMS
    ],
)
def test_code_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some write files
    exec(compile(PROGRAMS[name], name, "exec"), {"__name__": "document"})


# The CHANGELOG also names what is gone.
@pytest.mark.parametrize(
    "document", [d for d in DOCUMENTS if d.stem != "CHANGELOG"], ids=lambda path: path.stem
)
def test_files_and_commands_that_are_named_exist(document):
    text = document.read_text(encoding="utf-8")
    makefile = text_of("Makefile")
    for command in re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE):
        assert re.search(rf"^{command}:", makefile, re.MULTILINE), command
    for module in re.findall(r"python -m (experiments(?:\.\w+)*)", text):
        if module != "experiments.NAME":
            path = ROOT.joinpath(*module.split("."))
            assert (path / "__main__.py").exists() or path.with_suffix(".py").exists(), module
    for file in re.findall(r"`((?:tests|experiments|docs|strategies|scripts)/[\w/.-]+)`", text):
        assert (ROOT / file).exists(), file


def test_the_numbers_of_the_readme_are_those_of_the_results():
    sections = dict(
        re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", text_of("README.md"), re.S | re.M)
    )
    measured = dict(
        re.findall(
            r"^## (\w+)\n(.*?)(?=^## |\Z)", text_of("experiments/README.md"), re.S | re.M
        )
    )
    rows = re.findall(r"^\| \[.*#(\w+)\)[^|]*\|(.*)\|$", sections["What was measured"], re.M)
    assert len(rows) == 5
    for experiment, cells in rows:
        for number in re.findall(r"\d[\d.e-]+", cells):
            assert re.search(
                rf"(?<![\d.]){re.escape(number)}(?![\d.])", measured[experiment]
            ), (
                experiment,
                number,
            )


@pytest.mark.parametrize("page", ["layers", "strategies", "models", "determinism"])
def test_the_api_has_every_public_name_with_an_example(page):
    module = "eqx_norm" if page == "layers" else f"eqx_norm.{page}"
    names = set(re.findall(r"^::: (\S+)$", text_of(f"docs/api/{page}.md"), re.MULTILINE))
    public = {
        f"{module}.{name}"
        for name, value in vars(importlib.import_module(module)).items()
        if not name.startswith("_") and not isinstance(value, bool | ModuleType)
    }
    assert names == public
    code = "\n".join(re.findall(r"```python\n(.*?)```", text_of(f"docs/api/{page}.md"), re.S))
    assert {
        name for name in names if not re.search(rf"\b{name.split('.')[-1]}\b", code)
    } == set()
