"""Tests that code in documents and notebooks runs, and that named files and numbers exist.

`make docs` checks links and anchors when it builds the site.
"""

import functools
import importlib
import json
import re
from inspect import cleandoc
from types import ModuleType, SimpleNamespace

import equinox as eqx
import jax
import numpy as np
import optax
import pytest

import eqx_norm
from eqx_norm import BatchNorm, models, strategies
from tests.compiling import filter_jit
from tests.documents import programs_in, run
from tests.helpers import normal
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
            code = "\n".join(programs_in(text))
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
    run(PROGRAMS[name], tmp_path)


class Model(eqx.Module):
    """Has the layers that docstrings name."""

    conv1: eqx.nn.Conv2d
    bn1: eqx.nn.BatchNorm
    layers: list
    head: eqx.nn.Linear

    def __init__(self, key, nn=eqx_norm):
        self.conv1 = conv = eqx.nn.Conv2d(3, 3, 1, key=key)
        self.bn1 = nn.BatchNorm(3, "batch", mode="batch")
        self.layers = [conv, nn.BatchNorm(3, "batch", mode="batch")]
        self.head = eqx.nn.Linear(3, 2, key=key)

    def __call__(self, x, state):
        for conv, norm in ((self.conv1, self.bn1), self.layers):
            x, state = norm(conv(x), state)
        return self.head(x.mean((1, 2))), state


DOCUMENTED = [BatchNorm, strategies.Accumulated]
DOCUMENTED += [f for f in vars(models).values() if "```python" in (f.__doc__ or "")]


@pytest.mark.parametrize("documented", DOCUMENTED, ids=lambda value: value.__name__)
def test_example_in_docstring_runs(documented, tmp_path):
    key, path, x = jax.random.key(0), tmp_path / "model.eqx", normal(0, (4, 3, 2, 2))
    build = functools.partial(Model, nn=eqx.nn if documented is models.swap else eqx_norm)
    model, state = filter_jit(eqx.nn.make_with_state(build))(key)
    eqx.tree_serialise_leaves(path, (model, state))
    saved = {} if documented is models.swap else models.to_torch(model, state)
    saved = {name.replace("head", "fc"): array for name, array in saved.items()}
    torch = SimpleNamespace(load=lambda *_, **__: saved, from_numpy=np.asarray)
    names = {"eqx": eqx, "eqx_norm": eqx_norm, "functools": functools, "jax": jax}
    names |= {"conv": model.conv1, "norm": model.bn1, "batches": [x, x], "tqdm": iter}
    names |= {"optax": optax, "torch": torch, "states": [state, state]}
    names |= {"build": build, "key": key, "path": path, "model": model, "state": state, "x": x}
    (program,) = programs_in(cleandoc(documented.__doc__))
    names = vars(strategies) | vars(models) | vars(eqx_norm) | names
    names = {name: value for name, value in names.items() if not name.startswith("__")}
    run(program, tmp_path, **names)


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
    code = " ".join(programs_in(text_of(f"docs/api/{page}.md")))
    assert all(re.search(rf"\b{name.split('.')[-1]}\b", code) for name in names)
