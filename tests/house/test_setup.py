"""Tests that environments are made of the Python asked for, wherever the checkout lies."""

import os
import shutil
import subprocess
import sys

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
*'-m pip'*) echo "$*" >> calls ;;
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


def stand_in(checkout, version):
    text = STAND_IN.format(python=sys.executable, version=version.replace(".", ", "))
    path = checkout / f"the python {version}"
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def make(checkout, *arguments, **environment):
    """Runs make; returns how it ended, and what it has had installed."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("PYTHON", "MAKEFLAGS")}
    command, calls = ["make", *arguments], checkout / "calls"
    calls.write_text("", encoding="utf-8")
    environment = {**inherited, **environment}
    done = subprocess.run(
        command, cwd=checkout, env=environment, capture_output=True, text=True, check=False
    )
    return done, calls.read_text(encoding="utf-8")


def test_an_environment_is_made_once_and_anew_for_another_python(checkout):
    first, second = stand_in(checkout, "3.11.7"), stand_in(checkout, "3.12.1")
    done, installed = make(checkout, "setup", f"PYTHON={first}")
    assert done.returncode == 0, done.stderr
    assert ".venv: a new environment, of Python 3.11.7 in /somewhere/python" in done.stdout
    assert "--editable .[dev]" in installed  # not the linters, which make lint installs
    assert "--quiet" not in installed
    ready = checkout / ".venv" / "ready"
    assert ready.exists()
    # Neither where the Python is the same, nor where none is asked for.
    for arguments in ((f"PYTHON={first}",), ()):
        done, installed = make(checkout, "setup", *arguments)
        assert (done.returncode, installed) == (0, "")
    done, installed = make(checkout, "setup", f"PYTHON={second}")
    assert ".venv: a new environment, of Python 3.12.1" in done.stdout
    assert installed
    done, installed = make(checkout, "setup", PYTHON=first)  # from the environment
    assert ".venv: a new environment, of Python 3.11.7" in done.stdout
    os.utime(ready, (0, 0))  # older than pyproject.toml
    assert make(checkout, "setup", f"PYTHON={first}")[1]


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
def test_a_bad_python_says_so_in_words_and_harms_nothing(asked, said, checkout):
    make(checkout, "setup", f"PYTHON={stand_in(checkout, '3.11.7')}")
    ready = (checkout / ".venv" / "ready").stat().st_mtime_ns
    asked = stand_in(checkout, asked) if asked.startswith("3.") else asked
    done, installed = make(checkout, "test", f"PYTHON={asked}")
    assert (done.returncode, installed) == (2, "")
    first, second, *rest = done.stderr.splitlines()
    assert first.startswith(f"PYTHON={asked}: {said}")
    assert second.startswith("eqx-norm needs Python 3.11 or later. Name one, for example: make")
    assert len(rest) == 1  # make's own
    assert (checkout / ".venv" / "ready").stat().st_mtime_ns == ready
