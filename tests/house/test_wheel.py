"""Tests that a wheel has the strategies, with and without symbolic links in the checkout."""

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

    build(checkout, "sdist", tmp_path)
    (packed,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(packed) as archive:
        archive.extractall(tmp_path / "sdist", filter="data")
    (unpacked,) = (tmp_path / "sdist").iterdir()
    assert wheel(unpacked, tmp_path / "c")[1] == files

    program = "import eqx_norm.strategies as s; print(s.__file__, s.named('ema', 0.9).momentum)"
    run = python("-c", program, cwd=tmp_path, PYTHONPATH=str(path))
    assert run.stdout == f"{path / LINK / '__init__.py'} 0.9\n"


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
