"""Ctrl-C ends an experiment with one line and the exit code of an interrupted command."""

import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from experiments.lab import interrupt

ROOT = Path(__file__).parents[2]
# Beyond this something hangs, however busy the machine is.
LONG = 120


@pytest.fixture(autouse=True)
def not_ignored():
    """Has Ctrl-C reach what is started, also where the tests run in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def start(*command):
    """Returns a process in a group of its own, which Ctrl-C in its terminal would reach."""
    return subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for(process, module):
    """Waits until the process, started with `-X importtime`, has imported such a module."""
    assert process.stderr is not None
    for line in process.stderr:
        if line.rpartition("|")[2].strip().startswith(module):
            break


def interrupted(process):
    """Returns the exit code and what was said after Ctrl-C."""
    os.killpg(process.pid, signal.SIGINT)
    try:
        _, said = process.communicate(timeout=LONG)
    finally:
        process.kill()
    return process.returncode, said.splitlines()


@pytest.mark.parametrize("module", ["stability", "variance_clipping"])
@pytest.mark.parametrize("imported", ["numpy.", "jax"])
def test_while_it_imports(module, imported):
    """There NumPy and jaxlib cannot bear an exception: they crash."""
    process = start(sys.executable, "-X", "importtime", "-m", f"experiments.{module}")
    wait_for(process, imported)
    code, said = interrupted(process)
    assert code == -signal.SIGINT  # which a shell sees as 130
    said = [line for line in said if not line.startswith("import time:")]
    assert said == [f"python -m experiments.{module}: interrupted"]


@pytest.mark.parametrize("module", ["stability", "determinism"])
def test_while_it_works(module, tmp_path):
    """The second has processes that train, which get the signal as well."""
    process = start(sys.executable, "-m", f"experiments.{module}", "--out", str(tmp_path))
    began = time.monotonic()
    while not (tmp_path / "results").exists():  # made before the work
        assert time.monotonic() < began + LONG
        assert process.poll() is None
        time.sleep(0.1)
    time.sleep(1)
    code, said = interrupted(process)
    assert code == -signal.SIGINT
    assert said == [f"python -m experiments.{module}: interrupted"]
    assert not list(tmp_path.rglob("*.csv"))


def test_a_shell_sees_130():
    command = 'trap : INT; "$0" -X importtime -m experiments.stability; echo $?'
    with start("sh", "-c", command, sys.executable) as shell:
        assert shell.stdout is not None
        assert shell.stderr is not None
        wait_for(shell, "numpy.")
        os.killpg(shell.pid, signal.SIGINT)
        shell.stderr.close()  # nor does it matter that nobody reads what is said
        assert shell.stdout.read() == "130\n"
        assert shell.wait(LONG) == 0


def in_a_worker():
    importlib.import_module("experiments")
    return signal.getsignal(signal.SIGINT)


def test_a_worker_leaves_the_line_to_its_parent():
    alone = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=alone) as pool:
        assert pool.submit(in_a_worker).result() == signal.SIG_DFL


def test_an_import_changes_nothing():
    interrupt.say_so()
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


def test_in_the_background_it_goes_on():
    command = 'trap "" INT; exec "$0" -X importtime -m experiments.stability --help'
    process = start("sh", "-c", command, sys.executable)
    wait_for(process, "numpy.")
    code, _ = interrupted(process)
    assert code == 0
