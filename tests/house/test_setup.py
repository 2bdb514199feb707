"""Tests that environments are made of the Python asked for, wherever the checkout lies."""

import os
import re
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
*'import ensurepip'* | *'import pip'*) exec {python!r} -c "import sys
sys.exit('$2'.split()[1] not in '{has}')" ;;
*'import signal, venv'*) for folder; do :; done
mkdir -p "$folder/bin" && cp "$0" "$folder/bin/python" ;;
*'-m pip'*) echo "$*" >> calls ;;
esac
"""


@pytest.fixture
def checkout(tmp_path):
    folder = tmp_path / "a folder" / "with spaces"
    folder.mkdir(parents=True)
    for path in (ROOT / "Makefile", ROOT / "pyproject.toml", *ROOT.glob("constraints*.txt")):
        shutil.copy(path, folder)
    shutil.copytree(ROOT / "scripts", folder / "scripts")
    return folder


def stand_in(checkout, version, *, name="the python {}", has="ensurepip and pip"):
    text = STAND_IN.format(python=sys.executable, version=version.replace(".", ", "), has=has)
    path = checkout / name.format(version)
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def make(checkout, *arguments, **environment):
    """Runs make; returns how it ended, and what it has had installed."""
    inherited = {
        k: v
        for k, v in os.environ.items()
        if k not in ("PYTHON", "MAKEFLAGS", "MAKELEVEL", "MFLAGS")
    }
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


def test_linters_are_installed_once_for_each_environment(checkout):
    first, second = stand_in(checkout, "3.11.7"), stand_in(checkout, "3.12.1")
    for python in (first, second):
        for more in (("--editable .[dev]", "--editable .[lint]"), ()):
            done, installed = make(checkout, "linters", f"PYTHON={python}")
            assert done.returncode == 0, done.stderr
            assert [
                call.split("--constraint constraints.txt ")[1]
                for call in installed.splitlines()
            ] == [*more]


@pytest.mark.parametrize(
    ("has", "installed"),
    [
        ("ensurepip", ["--editable .[dev]"]),
        ("pip", ["--python .venv/bin/python install", "--editable .[dev]"]),
        ("neither", []),
    ],
)
def test_a_python_without_ensurepip_serves_if_it_has_pip(has, installed, checkout):
    done, calls = make(checkout, "setup", f"PYTHON={stand_in(checkout, '3.11.7', has=has)}")
    assert (done.returncode == 0) == bool(installed)
    assert len(calls.splitlines()) == len(installed)
    assert all(said in call for said, call in zip(installed, calls.splitlines(), strict=True))
    if not installed:
        assert "has neither ensurepip nor pip" in done.stderr
        assert not (checkout / ".venv" / "ready").exists()


def test_the_newest_jax_gets_a_newer_python_or_says_that_there_is_none(checkout):
    tools = checkout / "tools"
    tools.mkdir()
    for tool in ("cp", "find", "head", "make", "mkdir", "rm", "sh", "touch"):
        os.symlink(str(shutil.which(tool)), tools / tool)
    stand_in(checkout, "3.11.7", name="tools/python3")
    path = {"PATH": str(tools)}
    done, installed = make(checkout, ".venv-newest", **path)
    assert (done.returncode, installed) == (0, "")
    assert (
        done.stdout == ".venv-newest: no Python 3.12 or later was found here; nothing is done\n"
    )
    assert make(checkout, "test-newest", **path)[0].returncode == 0

    stand_in(checkout, "3.13.0", name="tools/python3.13")
    done, installed = make(checkout, ".venv-newest", **path)
    assert ".venv-newest: a new environment, of Python 3.13.0 in" in done.stdout
    assert "--constraint constraints-newest.txt --editable .[dev]" in installed
    # The Python that is asked for, where it is new enough.
    newer = stand_in(checkout, "3.14.2")
    done, installed = make(checkout, ".venv-newest", f"PYTHON={newer}", **path)
    assert ".venv-newest: a new environment, of Python 3.14.2 in" in done.stdout
    assert make(checkout, ".venv-newest", f"PYTHON={newer}", **path)[1] == ""


def test_every_environment_has_its_constraints(checkout):
    python = stand_in(checkout, "3.12.1")
    said = (checkout / "Makefile").read_text(encoding="utf-8")
    names = re.findall(r"^\w+ := (\.venv\S*)$", said, re.MULTILINE)
    assert len(names) == 7
    for name in names:
        done, installed = make(checkout, name, f"PYTHON={python}")
        assert done.returncode == 0, done.stderr
        assert (checkout / name / "ready").exists()
        for constraints in re.findall(r"--constraint (\S+)", installed):
            assert (checkout / constraints).exists()
    make(checkout, "clean")
    assert not [*checkout.glob(".venv*")]
