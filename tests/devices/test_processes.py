"""Tests that several processes train as one does, restore a checkpoint, and notice a crash."""

import json
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tests.compiling import XLA_FLAGS
from tests.devices.train_in_processes import HEARTBEAT
from tests.processes import python

DEVICES = 4


def run(folder, processes, *options):
    """Returns what each process printed, its exit status, and the time when it ended."""
    with socket.socket() as bound:
        bound.bind(("localhost", 0))
        coordinator = f"localhost:{bound.getsockname()[1]}"  # a free port
    count = f"--xla_force_host_platform_device_count={DEVICES // processes}"
    environment: Any = {"XLA_FLAGS": f"{XLA_FLAGS} {count}", "JAX_PLATFORMS": "cpu"}
    command = "-m", "tests.devices.train_in_processes", folder, *options

    def start(process):
        how = "--coordinator", coordinator, "--processes", processes, "--process", process
        arguments, fails = map(str, (*command, *how)), "--kill" in options
        ended = python(*arguments, fails=fails, **environment)
        # The results are in the last line, because Gloo prints lines before.
        return json.loads(ended.stdout.splitlines()[-1]), ended.returncode, time.monotonic()

    with ThreadPoolExecutor(processes) as pool:
        return list(pool.map(start, range(processes)))


@pytest.mark.long
def test_processes_train_as_one_process_with_as_many_devices(tmp_path):
    ((one, *_),) = run(tmp_path / "one", 1)
    several = run(tmp_path / "several", DEVICES, "--kill")
    found = several[0][0]
    assert all(each == found for each, *_ in several)
    # The sum of the gradients has another order.
    assert found["statistics after a step"] == one["statistics after a step"]
    np.testing.assert_allclose(found["weights"], one["weights"], rtol=1e-5, atol=1e-5)

    *others, (_, status, killed_at) = several
    assert status == -signal.SIGKILL
    assert all(ended - killed_at < HEARTBEAT + 5 for *_, ended in others)

    for restored, *_ in run(tmp_path / "several", DEVICES // 2, "--restore"):
        np.testing.assert_allclose(restored["weights"], one["weights"], rtol=1e-5, atol=1e-5)
