"""Tests that environments are made of the Python asked for, wherever the checkout lies."""

import os
import shutil
import subprocess
import sys
import tomllib

import pytest

from tests.processes import ROOT

# Stands in for a Python of that version: answers what it is asked for, and makes environments
# out of itself, without anything in them.
STAND_IN = """#!/bin/sh
case "$*" in
*version_info*) exec {python!r} -c "import sys
sys.version_info = ({version}, 'final', 0); sys.base_prefix = '/somewhere/python {version}'
exec(sys.argv[1])" "$2" ;;
*sys.executable*) echo "$0" ;;
*'import signal, venv'*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
*'-m pip'*) echo "$*" >> "{calls}" ;;
esac
"""


@pytest.fixture
def checkout(tmp_path):
    folder = tmp_path / "a folder" / "with spaces"
    folder.mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "scripts", folder / "scripts")
    return folder


@pytest.fixture
def python(tmp_path):
    def stand_in(version):
        path = tmp_path / f"the python {version}"
        text = STAND_IN.format(
            python=sys.executable, version=version.replace(".", ", "), calls=tmp_path / "calls"
        )
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)
        return str(path)

    return stand_in


@pytest.fixture
def make(checkout, tmp_path):
    def run(*arguments, **environment):
        inherited = {k: v for k, v in os.environ.items() if k not in ("PYTHON", "MAKEFLAGS")}
        done = subprocess.run(
            ["make", *arguments],
            cwd=checkout,
            env={**inherited, **environment},
            capture_output=True,
            text=True,
            check=False,
        )
        calls = tmp_path / "calls"
        installed = calls.read_text(encoding="utf-8") if calls.exists() else ""
        calls.unlink(missing_ok=True)
        return done, installed

    return run


def test_an_environment_is_made_once_and_anew_for_another_python(checkout, python, make):
    first, second = python("3.11.7"), python("3.12.1")
    done, installed = make("setup", f"PYTHON={first}")
    assert done.returncode == 0, done.stderr
    assert ".venv: a new environment, of Python 3.11.7 in /somewhere/python" in done.stdout
    assert "--editable .[dev]" in installed
    assert "--quiet" not in installed
    assert (checkout / ".venv" / "ready").exists()
    # Neither where the Python is the same, nor where none is asked for.
    for arguments in ((f"PYTHON={first}",), ()):
        done, installed = make("setup", *arguments)
        assert done.returncode == 0
        assert not installed
    done, installed = make("setup", f"PYTHON={second}")
    assert ".venv: a new environment, of Python 3.12.1" in done.stdout
    assert installed
    done, installed = make("setup", PYTHON=first)  # from the environment
    assert ".venv: a new environment, of Python 3.11.7" in done.stdout
    os.utime(checkout / ".venv" / "ready", (0, 0))  # older than pyproject.toml
    assert make("setup", f"PYTHON={first}")[1]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("python3.99", "there is no such command"),
        ("", "there is no such command"),
        ("true", "this is no Python, or one that does not start"),
        ("echo", "this is no Python, or one that does not start: -c import"),
        ("3.10.4", "this is Python 3.10.4"),
    ],
)
def test_a_bad_python_says_so_in_words_and_harms_nothing(asked, said, checkout, python, make):
    make("setup", f"PYTHON={python('3.11.7')}")
    ready = (checkout / ".venv" / "ready").stat().st_mtime_ns
    asked = python(asked) if asked.startswith("3.") else asked
    done, installed = make("test", f"PYTHON={asked}")
    assert done.returncode == 2
    assert not installed
    first, second, *rest = done.stderr.splitlines()
    assert first.startswith(f"PYTHON={asked}: {said}")
    assert second.startswith("eqx-norm needs Python 3.11 or later. Name one, for example: make")
    assert len(rest) == 1  # make's own
    assert (checkout / ".venv" / "ready").stat().st_mtime_ns == ready


def test_only_lint_needs_the_linters(checkout, python, make):
    stand_in = python("3.11.7")
    _, installed = make("setup", f"PYTHON={stand_in}")
    assert "lint" not in installed
    for tool in ("ruff", "pyright"):
        path = checkout / ".venv" / "bin" / tool
        path.write_text("#!/bin/sh\n", encoding="utf-8")
        path.chmod(0o755)
    done, installed = make("lint")
    assert done.returncode == 0, done.stderr
    assert "--editable .[lint]" in installed
    assert not make("lint")[1]
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = pyproject["project"]["optional-dependencies"]
    assert {name.partition("[")[0] for name in extras["lint"]} == {"pyright", "ruff"}
    assert not any(name.startswith(("pyright", "ruff")) for name in extras["dev"])
