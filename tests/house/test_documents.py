"""Tests that code in the documents runs, links lead somewhere, and commands exist."""

import re

import pytest

from tests.processes import ROOT

DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
DOCUMENTS += [ROOT / "strategies" / "README.md", ROOT / "experiments" / "README.md"]
DOCS = ("models", "devices", "determinism", "small_batches")
CODE = {  # by document and heading
    f"{document}, {heading}": block
    for document in ["README.md", *(f"docs/{d}.md" for d in DOCS)]
    for heading, text in re.findall(
        r"^## (.+?)\n(.*?)(?=^## |\Z)",
        (ROOT / document).read_text(encoding="utf-8"),
        re.DOTALL | re.MULTILINE,
    )
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    # That comes before JAX starts: tests/determinism/test_recipe.py.
    if heading != "The recipe"
}


def name(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize(
    "place",
    [
        place if place.startswith("README") else pytest.param(place, marks=pytest.mark.long)
        for place in CODE
    ],
)
def test_code_runs(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some write files
    exec(compile(CODE[place], place, "exec"), {"__name__": "document"})


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_links_lead_somewhere(document):
    text = document.read_text(encoding="utf-8")
    for target, _, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(#([^)]+))?\)", text):
        path = document.parent / target if target else document
        assert path.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}
            assert anchor in anchors, (target, anchor)


# The CHANGELOG also names what is gone.
@pytest.mark.parametrize("document", [d for d in DOCUMENTS if d.stem != "CHANGELOG"], ids=name)
def test_files_and_commands_that_are_named_exist(document):
    text = document.read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for command in re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE):
        assert re.search(rf"^{command}:", makefile, re.MULTILINE), command
    for module in re.findall(r"python -m (experiments(?:\.\w+)*)", text):
        if module != "experiments.NAME":
            path = ROOT.joinpath(*module.split("."))
            assert (path / "__main__.py").exists() or path.with_suffix(".py").exists(), module
    for file in re.findall(r"`((?:tests|experiments|docs|strategies|scripts)/[\w/.-]+)`", text):
        assert (ROOT / file).exists(), file
