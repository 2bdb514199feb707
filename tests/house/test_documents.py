"""Tests that code in documents and notebooks runs, and that named files and numbers exist.

`make docs` checks links and anchors when it builds the site.
"""

import importlib
import json
import re
from types import ModuleType

import equinox as eqx
import jax
import pytest

from eqx_norm import BatchNorm
from tests.helpers import example, normal
from tests.processes import ROOT, python

DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
DOCUMENTS += [ROOT / "strategies" / "README.md", ROOT / "experiments" / "README.md"]


def text_of(name):
    return (ROOT / name).read_text(encoding="utf-8")


def programs():
    """Yields a name and the code of each section of the documents, each public name of the API,
    and each question of the FAQ."""
    for path in sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md")]):
        document = str(path.relative_to(ROOT))
        headings = r"^### " if path.stem == "faq" else r"^(?:## |::: )"
        for section in re.split(headings, text_of(document), flags=re.MULTILINE)[1:]:
            heading, _, text = section.partition("\n")
            code = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
            # `deterministic` comes before JAX starts: tests/determinism/test_recipe.py.
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
def test_code_of_documents_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some programs write files
    exec(compile(PROGRAMS[name], name, "exec"), {"__name__": "document"})


def test_batch_norm_docstring_example_trains_then_infers():
    names = {"BatchNorm": BatchNorm, "eqx": eqx, "jax": jax, "x": normal(0, (2, 3, 2, 2))}
    names = example(BatchNorm, **names)
    index = names["model"].memory_index
    assert names["state"].get(index).accepted == names["_"].get(index).accepted == 1


@pytest.mark.long
@pytest.mark.parametrize(
    "path", sorted(ROOT.glob("notebooks/*.ipynb")), ids=lambda path: path.stem
)
def test_notebook_runs(path, tmp_path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    # A notebook says so if it needs the repository, not only the package.
    needs_checkout = any("from experiments" in cell for cell in code)
    assert needs_checkout == ("in a checkout" in "".join(cells[0]["source"]))
    program = tmp_path / "notebook.py"
    program.write_text("\n\n".join(code), encoding="utf-8")
    # Pictures are drawn, and not shown.
    assert not python("-W", "error", program, MPLBACKEND="agg").stderr


# The CHANGELOG also names removed files.
@pytest.mark.parametrize(
    "document", [d for d in DOCUMENTS if d.stem != "CHANGELOG"], ids=lambda path: path.stem
)
def test_files_and_commands_named_in_documents_exist(document):
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


def sections(document):
    """Returns the text of each section by its heading."""
    found = re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", text_of(document), re.S | re.M)
    return dict(found)


def test_readme_numbers_are_in_the_results():
    pages = sections("experiments/README.md").items()
    results = {heading.lower().replace(" ", "-"): page for heading, page in pages}
    table = sections("README.md")["What was measured"]
    rows = re.findall(r"^\| \[.*#([\w-]+)\)[^|]*\|(.*)\|$", table, re.M)
    assert len(rows) == 10
    for experiment, cells in rows:
        for number in re.findall(r"\d[\d.e-]+", cells):
            pattern = rf"(?<![\d.]){re.escape(number)}(?!\.?\d)"
            assert re.search(pattern, results[experiment]), (experiment, number)


@pytest.mark.parametrize("page", ["layers", "strategies", "models", "determinism"])
def test_api_pages_have_every_public_name_with_an_example(page):
    module = "eqx_norm" if page == "layers" else f"eqx_norm.{page}"
    names = set(re.findall(r"^::: (\S+)$", text_of(f"docs/api/{page}.md"), re.MULTILINE))
    public = {
        f"{module}.{name}"
        for name, value in vars(importlib.import_module(module)).items()
        if not name.startswith("_") and not isinstance(value, bool | ModuleType)
    }
    assert names == public
    code = " ".join(re.findall(r"```python\n(.*?)```", text_of(f"docs/api/{page}.md"), re.S))
    assert all(re.search(rf"\b{name.split('.')[-1]}\b", code) for name in names)
