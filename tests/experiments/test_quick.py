"""Runs every experiment with --quick, and checks that all its claims hold."""

import importlib
import json
import subprocess
import sys

import pytest

from tests.processes import ROOT

NAMES = sorted(path.stem for path in (ROOT / "experiments").glob("[a-z]*.py"))


@pytest.mark.parametrize("name", NAMES)
def test_help_teaches(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit):
        importlib.import_module(f"experiments.{name}").main()
    said = capsys.readouterr().out
    assert said.startswith(f"usage: python -m experiments.{name} ")
    assert f"python -m experiments.{name} --quick" in said


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in NAMES if name != "compiled"])
def test_quick_holds_every_claim(name, tmp_path):
    """All but `compiled`, which needs a plugin of jax: make gpu-compile-check."""
    command = [sys.executable, "-W", "error", "-m", f"experiments.{name}", "--quick", "--out"]
    done = subprocess.run(
        [*command, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = json.loads((tmp_path / "results" / f"{name}.json").read_text())["verdicts"]
    assert verdicts
    assert all(holds for _, _, holds in verdicts)
    assert done.stdout.count("| holds") == len(verdicts)
