"""Tests the files of a wheel, and that a user's code with it passes strict type checkers."""

import json
import re
import shutil
import sysconfig
import tarfile
import types
import zipfile

import pytest

import eqx_norm.determinism
import eqx_norm.models
import eqx_norm.strategies
from tests.processes import ROOT, python


def build(target, checkout, folder):
    """Builds a wheel or an sdist into a folder of its own, and returns its path."""
    command = ("-m", "hatchling", "build", "--target", target, "--directory", folder)
    python(*command, cwd=checkout)
    (path,) = folder.glob("eqx_norm-*")
    return path


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


def test_wheel_has_the_package_alone(wheel):
    package, strategies = ROOT / "eqx_norm", ROOT / "strategies"
    files = {f"eqx_norm/{path.relative_to(package)}" for path in package.rglob("*.py")}
    files |= {f"eqx_norm/{path.relative_to(ROOT)}" for path in strategies.rglob("*.py")}
    packed = zipfile.ZipFile(wheel).namelist()
    info = {name for name in packed if name.startswith("eqx_norm-")}
    assert sorted(packed) == sorted(files | {"eqx_norm/py.typed"} | info)
    assert any(name.endswith("/LICENSE") for name in info)


def test_wheel_from_an_sdist_without_links_is_bitwise_equal(wheel, tmp_path):
    checkout = tmp_path / "without links"
    for folder in ("eqx_norm", "strategies"):
        shutil.copytree(ROOT / folder, checkout / folder, symlinks=True)
    for file in ("CHANGELOG.md", "LICENSE", "README.md", "pyproject.toml"):
        shutil.copy(ROOT / file, checkout)
    link = checkout / "eqx_norm" / "strategies"
    target = str(link.readlink())
    assert target == "../strategies"
    link.unlink()
    link.write_text(target, encoding="utf-8")  # as git writes it on Windows
    with tarfile.open(build("sdist", checkout, tmp_path / "dist")) as archive:
        archive.extractall(tmp_path / "sdist", filter="data")
    (unpacked,) = (tmp_path / "sdist").iterdir()
    for source in (checkout, unpacked):
        assert build("wheel", source, tmp_path / "wheel").read_bytes() == wheel.read_bytes()


def test_every_link_of_the_description_is_absolute(wheel):
    """Tests the README as a package index shows it, without the files of the repository."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        description = archive.read(name).decode("utf-8")
    links = re.findall(r"\]\(([^)\s]+)\)", description)
    assert len(links) == len(re.findall(r"\]\(", (ROOT / "README.md").read_text("utf-8")))
    for link in links:
        assert link.startswith("https://")
        path = re.match(r"https://\S+/eqx-norm/eqx-norm/(?:blob/)?main/([^#]+)", link)
        assert path is None or (ROOT / path[1]).exists(), link
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", description)
    assert all(link.startswith("https://raw.githubusercontent.com/") for link in pictures)


def public_names():
    """Returns a program that uses each public name, so that a strict checker reads its type."""
    lines = list[str]()
    for module in (eqx_norm, eqx_norm.determinism, eqx_norm.models, eqx_norm.strategies):
        lines.append(f"import {module.__name__}")
        for name in dir(module):
            is_module = isinstance(getattr(module, name), types.ModuleType)
            if not name.startswith("_") and not is_module:
                lines.append(f"{module.__name__}.{name}")
    return "\n".join(lines)


@pytest.mark.long
@pytest.mark.parametrize(
    "checker",
    [
        ("mypy", "--strict", "--python-executable", "env/bin/python", "stranger.py"),
        ("pyright", "--pythonpath", "env/bin/python"),
    ],
    ids=lambda checker: checker[0],
)
def test_user_code_passes_strict_type_checkers(checker, wheel, tmp_path):
    pytest.importorskip(checker[0], reason="make lint installs it")
    python("-m", "venv", "--without-pip", tmp_path / "env")
    (site,) = tmp_path.glob("env/lib/python*/site-packages")
    zipfile.ZipFile(wheel).extractall(site)
    # The dependencies of eqx-norm. An editable eqx-norm is a .pth, too, and so not found there.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    shutil.copy(ROOT / "tests" / "house" / "stranger.py", tmp_path)
    (tmp_path / "names.py").write_text(public_names(), encoding="utf-8")
    settings = {"include": ["stranger.py", "names.py"], "typeCheckingMode": "strict"}
    settings |= {"reportUnnecessaryTypeIgnoreComment": "error"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings), encoding="utf-8")
    python("-m", *checker, cwd=tmp_path)
