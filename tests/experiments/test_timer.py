"""Tests that programs in a process of their own are timed, and that the process ends."""

import os
import subprocess
import sys
from concurrent.futures.process import BrokenProcessPool

import numpy as np
import pytest

from experiments.common.timer import Program, Remote, interleave
from tests.processes import ROOT


def program(value):
    if value < 0:
        raise ValueError("negative: the other process says so")
    return Program(lambda: (np.sqrt(value), os.getpid(), ()), lambda y: y, lambda: None)


def test_interleave_runs_programs_of_two_processes_in_turns():
    remote = Remote()
    programs = {"here": program(4), "there": remote.make(program, 9)}
    for cold in (False, True):
        taken = interleave(programs, 3, cold=cold)
        assert all(len(ms) == 3 and min(ms) > 0 for ms in taken.values())
    assert remote.answer() == [3]
    with pytest.raises(ValueError, match="the other process says so"):
        remote.make(program, -1)
    with pytest.raises(BrokenProcessPool):
        remote.make(os._exit, 1)


KILLED = """
import os, signal
from experiments.common.timer import Remote

Remote().make(print, "started")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_remote_process_ends_when_its_parent_is_killed():
    """Reads the pipe, which is closed when no process holds it."""
    command = [sys.executable, "-c", KILLED]
    ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, timeout=60, check=False)
    assert ended.stdout == b"started\n"
