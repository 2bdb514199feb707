"""Starts Python processes, without checked annotations or with several devices."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def python(
    *arguments: Any, fails: bool = False, cwd: Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs `python ARGUMENTS`, which must succeed, or fail if `fails`."""
    finished = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **environment},
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (finished.returncode != 0) == fails, finished.stdout + finished.stderr
    return finished


def on_devices(count: int, *arguments: str, flags: str = "") -> None:
    """Runs `python ARGUMENTS` with `count` CPU devices, fixed when JAX starts."""
    flags = f"--xla_force_host_platform_device_count={count} {flags}"
    python(*arguments, XLA_FLAGS=flags, JAX_PLATFORMS="cpu")
