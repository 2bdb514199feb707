"""Tests that a wheel has the strategies, with and without symbolic links in the checkout."""

import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.processes import ROOT, python

BUILT_FROM = (
    "CHANGELOG.md",
    "LICENSE",
    "README.md",
    "eqx_norm",
    "hatch_build.py",
    "pyproject.toml",
    "strategies",
)
LINK = Path("eqx_norm", "strategies")


@pytest.fixture
def checkout(tmp_path):
    """Returns a checkout as git writes it where there are no symbolic links."""
    folder = tmp_path / "without links"
    folder.mkdir()
    for name in BUILT_FROM:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        how = {"symlinks": True, "ignore": shutil.ignore_patterns("__pycache__")}
        copy(ROOT / name, folder / name, **(how if copy is shutil.copytree else {}))
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
    assert "eqx_norm/strategies" not in files
    assert not [file for file in files if file.startswith("strategies")]
    assert wheel(ROOT, tmp_path / "b")[1] == files

    build(checkout, "sdist", tmp_path)
    (packed,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(packed) as archive:
        archive.extractall(tmp_path / "sdist", filter="data")
    (unpacked,) = (tmp_path / "sdist").iterdir()
    assert wheel(unpacked, tmp_path / "c")[1] == files

    program = (
        "import eqx_norm, eqx_norm.strategies as s; "
        "print(eqx_norm.__file__, s.__file__, s.named('ema', 0.9).momentum)"
    )
    run = python("-c", program, cwd=tmp_path, PYTHONPATH=str(path))
    package = path / "eqx_norm"
    expected = f"{package / '__init__.py'} {package / 'strategies' / '__init__.py'} 0.9\n"
    assert run.stdout == expected


@pytest.mark.parametrize("target", ["wheel", "sdist"])
def test_without_strategies_there_is_none(checkout, tmp_path, target):
    shutil.rmtree(checkout / "strategies")
    built = build(checkout, target, tmp_path / "out", fails=True)
    assert built.returncode == 1
    said = built.stdout + built.stderr
    assert f"cannot be built: {checkout / 'strategies'} is missing" in said
    assert "git checkout -- strategies" in said
    assert "Traceback" not in said
    assert not list(tmp_path.glob("out/*"))


def test_an_editable_one_needs_the_link(checkout, tmp_path):
    """Where the link is, it works: these tests run from an editable one."""
    program = "import sys; from hatchling.build import build_editable as b; b(sys.argv[1])"
    built = python("-c", program, tmp_path, cwd=checkout, fails=True)
    assert built.returncode == 1
    said = built.stdout + built.stderr
    assert f"{checkout / LINK} is no link to ../strategies" in said
    assert "core.symlinks true" in said
    assert "Traceback" not in said
