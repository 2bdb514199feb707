"""Tests what a wheel and an sdist hold, with and without symbolic links in the checkout."""

import email
import re
import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.processes import ROOT, python

LINK = Path("eqx_norm", "strategies")


@pytest.fixture
def checkout(tmp_path):
    """Returns a checkout as git writes it where there are no symbolic links."""
    folder = tmp_path / "without links"
    folder.mkdir()
    for name in ("CHANGELOG.md", "LICENSE", "README.md", "hatch_build.py", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    for name in ("eqx_norm", "strategies"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
    (folder / LINK).unlink()
    (folder / LINK).write_text("../strategies", encoding="utf-8")
    return folder


def build(checkout, target, out, **how):
    arguments = ("-m", "hatchling", "build", "--target", target, "--directory", out)
    return python(*arguments, cwd=checkout, **how)


def wheel(checkout, out):
    """Returns the wheel, and its files."""
    build(checkout, "wheel", out)
    (path,) = out.glob("*.whl")
    with zipfile.ZipFile(path) as packed:
        return path, set(packed.namelist())


def test_it_is_the_same_with_links_without_them_and_from_an_sdist(checkout, tmp_path):
    path, files = wheel(checkout, tmp_path / "a")
    sources = {file.relative_to(ROOT) for file in (ROOT / "strategies").glob("*.py")}
    assert {f"eqx_norm/{source}" for source in sources} <= files
    assert not [f for f in files if f.startswith("strategies") or f == "eqx_norm/strategies"]
    assert wheel(ROOT, tmp_path / "b")[1] == files
    assert {f for f in files if f.startswith("eqx_norm/") and not f.endswith(".py")} == {
        "eqx_norm/py.typed"
    }
    assert {f.split("/")[0] for f in files} == {
        "eqx_norm",
        path.name.split("-py3")[0] + ".dist-info",
    }
    assert any(f.endswith(".dist-info/licenses/LICENSE") for f in files)

    for name, source in (("without", checkout), ("with", ROOT)):
        out = tmp_path / name
        build(source, "sdist", out)
        (packed,) = out.glob("*.tar.gz")
        with tarfile.open(packed) as archive:
            archive.extractall(out / "sdist", filter="data")
        (unpacked,) = (out / "sdist").iterdir()
        top = {f.stem for f in unpacked.iterdir()} - {".gitignore", "CITATION"}
        parts = "CHANGELOG LICENSE PKG-INFO README eqx_norm hatch_build pyproject strategies"
        assert top == {*parts.split()}
        assert wheel(unpacked, out / "wheel")[1] == files

    program = "import eqx_norm.strategies as s; print(s.__file__, s.named('ema', 0.9).momentum)"
    run = python("-c", program, cwd=tmp_path, PYTHONPATH=str(path))
    assert run.stdout == f"{path / LINK / '__init__.py'} 0.9\n"


def without_code(text):
    return re.sub(r"^```.*?^```$|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)


def test_every_link_of_the_description_is_absolute(tmp_path):
    """A package index shows it without the files of the repository; code stays as it is."""
    path, files = wheel(ROOT, tmp_path)
    with zipfile.ZipFile(path) as packed:
        (metadata,) = (f for f in files if f.endswith(".dist-info/METADATA"))
        message = email.message_from_string(packed.read(metadata).decode("utf-8"))
    assert message["Description-Content-Type"] == "text/markdown"
    description = str(message.get_payload())
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
    assert blocks.findall(description) == blocks.findall(readme)

    text = without_code(description)
    links = re.findall(
        r"\]\(\s*([^)\s]+)|^\[[^\]]+\]:\s*(\S+)|\b(?:src|href)=\"([^\"]*)", text, re.M
    )
    targets = ["".join(link) for link in links]
    assert targets
    assert [target for target in targets if not target.startswith("https://")] == []
    # What points into the repository is there.
    for target in targets:
        place = re.match(r"https://\S+/eqx-norm/eqx-norm/(?:blob/)?main/([^#]+)", target)
        assert place is None or (ROOT / place[1]).exists(), target
    images = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text)
    assert all(i.startswith("https://raw.githubusercontent.com/") for i in images)


def fails_in_words(built, *words):
    said = built.stdout + built.stderr
    assert all(word in said for word in words)
    assert "Traceback" not in said


@pytest.mark.parametrize("target", ["wheel", "sdist"])
def test_without_strategies_there_is_none(checkout, tmp_path, target):
    shutil.rmtree(checkout / "strategies")
    built = build(checkout, target, tmp_path / "out", fails=True)
    missing = f"cannot be built: {checkout / 'strategies'} is missing"
    fails_in_words(built, missing, "git checkout -- strategies")
    assert not list(tmp_path.glob("out/*"))


def test_an_editable_one_needs_the_link(checkout, tmp_path):
    """Where the link is, it works: these tests run from an editable one."""
    program = "import sys; from hatchling.build import build_editable as b; b(sys.argv[1])"
    built = python("-c", program, tmp_path, cwd=checkout, fails=True)
    no_link = f"{checkout / LINK} is no link to ../strategies"
    fails_in_words(built, no_link, "core.symlinks true")
