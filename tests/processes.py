"""A Python process of its own, because the number of CPU devices is fixed when JAX starts."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def on_devices(
    count: int, *arguments: str, fails: bool = False, flags: str = ""
) -> subprocess.CompletedProcess[str]:
    """`python ARGUMENTS`, whose JAX takes the CPU for so many devices."""
    finished = subprocess.run(
        [sys.executable, *arguments],
        env={
            **os.environ,
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={count} {flags}",
            "JAX_PLATFORMS": "cpu",
        },
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (finished.returncode != 0) == fails, finished.stderr
    return finished
