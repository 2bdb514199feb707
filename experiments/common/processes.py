"""Starts an experiment's script again in separate processes, and fingerprints arrays."""

import json
import os
from typing import Any, NamedTuple

import jax
import numpy as np

from eqx_norm.determinism import fingerprint
from tests.processes import python


def bits_of(tree: Any) -> str:
    """Returns the fingerprint of all arrays of a tree, as 16 digits."""
    first, second = np.asarray(jax.jit(fingerprint)(jax.tree.map(np.asarray, tree))).tolist()
    return f"{first:08x}{second:08x}"


def start(
    name: str, run: NamedTuple, devices: int, *, fails: bool = False, **environment: str
) -> tuple[int, Any]:
    """Runs `python -m experiments.NAME --run JSON` with a number of CPU devices.

    Returns the exit status, which must not be 0 if `fails`, and the value in the last line.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    flags += f" --xla_force_host_platform_device_count={devices}"
    variables: Any = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, **environment}
    described = json.dumps(run._asdict())
    ended = python("-m", f"experiments.{name}", "--run", described, fails=fails, **variables)
    # The value is in the last line, because Gloo prints lines before.
    return ended.returncode, json.loads(ended.stdout.splitlines()[-1])
