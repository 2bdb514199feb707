"""Runs every experiment with --quick, and checks that all its claims hold."""

import importlib
import json
import sys

import pytest

from tests.processes import ROOT, python

NAMES = sorted(path.stem for path in (ROOT / "experiments").glob("[a-z]*.py"))


@pytest.mark.parametrize("name", NAMES)
def test_help_has_usage_and_quick_example(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    monkeypatch.setattr("signal.signal", lambda *_: None)  # SIGTERM ends pytest as before
    with pytest.raises(SystemExit):
        importlib.import_module(f"experiments.{name}").main()
    printed = capsys.readouterr().out
    assert printed.startswith(f"usage: python -m experiments.{name} ")
    assert f"python -m experiments.{name} --quick" in printed


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in NAMES if name != "compiled"])
def test_quick_run_holds_every_claim(name, tmp_path):
    """Runs all but `compiled`, which needs a plugin of jax: make gpu-compile-check."""
    module = f"experiments.{name}"
    printed = python("-W", "error", "-m", module, "--quick", "--out", tmp_path).stdout
    verdicts = json.loads((tmp_path / "results" / f"{name}.json").read_text())["verdicts"]
    assert verdicts
    assert all(holds for _, _, holds in verdicts)
    assert printed.count("| holds") == len(verdicts)
