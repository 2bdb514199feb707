"""Tests that a user's code passes mypy --strict and pyright's strict mode beside the wheel."""

import json
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.processes import ROOT, python

pytestmark = pytest.mark.long

STRANGER = ROOT / "tests" / "house" / "stranger.py"
# As in a project that has never seen this one.
PYRIGHT = {"include": ["stranger.py"], "typeCheckingMode": "strict", "pythonVersion": "3.11"}


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Returns a folder with a user's file, and an environment that has the wheel installed."""
    folder = tmp_path_factory.mktemp("stranger")
    python("-m", "hatchling", "build", "--target", "wheel", "--directory", folder)
    python("-m", "venv", "--without-pip", folder / "env")
    (site,) = folder.glob("env/lib/python*/site-packages")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(site)
    # What eqx-norm depends on. The editable eqx-norm is not found there: it is a .pth, too.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    shutil.copy(STRANGER, folder)
    (folder / "pyrightconfig.json").write_text(json.dumps(PYRIGHT), encoding="utf-8")
    program = "import eqx_norm; print(eqx_norm.__file__)"
    where = check(folder, "env/bin/python", "-c", program)
    assert where == f"{site / 'eqx_norm' / '__init__.py'}\n"
    return folder


def checker(name: str) -> str:
    """Returns the path of a tool beside this Python; skips the test if there is none."""
    found = shutil.which(name, path=str(Path(sys.executable).parent))
    if found is None:
        pytest.skip(f"{name} is not installed: make lint installs it")
    return found


def check(folder: Path, *command: str) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_mypy_strict(installed):
    environment = ("--python-executable", "env/bin/python", "--cache-dir", "cache")
    said = check(installed, checker("mypy"), "--strict", *environment, "stranger.py")
    assert said == "Success: no issues found in 1 source file\n"


def test_pyright_strict(installed):
    said = check(installed, checker("pyright"), "--pythonpath", "env/bin/python")
    assert said.endswith("0 errors, 0 warnings, 0 informations\n")


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("mypy", ("--strict", "--python-executable", "env/bin/python", "--cache-dir", "cache")),
        ("pyright", ("--pythonpath", "env/bin/python")),
    ],
)
def test_a_mistake_is_seen(tool, arguments, installed):
    """So that neither takes the package for untyped."""
    file = installed / "stranger.py"
    text = file.read_text(encoding="utf-8")
    wrong = text.replace("ghost_batches(x, 2)", 'ghost_batches(x, "2")', 1)
    assert wrong != text
    file.write_text(wrong, encoding="utf-8")
    try:
        command = [checker(tool), *arguments, *(["stranger.py"] if tool == "mypy" else [])]
        done = subprocess.run(
            command, cwd=installed, capture_output=True, text=True, check=False
        )
    finally:
        file.write_text(text, encoding="utf-8")
    assert done.returncode == 1
    assert "1 error" in done.stdout
