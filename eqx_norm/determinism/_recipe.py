"""Defines `deterministic`, which makes runs of one program give the same bits."""

import os
import platform
import random
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

# XLA says that FLAG "guarantees run-to-run determinism on GPU"; FLAG includes other flags.
# An unknown flag ends the process: tests/determinism/test_recipe.py starts JAX with FLAG.
FLAG = "--xla_gpu_deterministic_ops"
THREADS = "PJRT_NPROC"
SET = "set, for when JAX starts"


class Setting(NamedTuple):
    """Holds one setting of a `Recipe`: its name, value and status, and its purpose."""

    name: str
    value: str
    status: str
    purpose: str


class Recipe(NamedTuple):
    """Holds the `settings` that `deterministic` set or found; prints as a table."""

    settings: tuple[Setting, ...]

    def __str__(self) -> str:
        rows = [("setting", "value", "status", "what for"), *self.settings]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def deterministic(
    seed: int | np.integer, *, cpu_threads: int | np.integer | None = None
) -> Recipe:
    """Sets up this process to give the same bits as other processes with the same program.

    ```python
    from eqx_norm.determinism import deterministic

    print(deterministic(seed=0, cpu_threads=2))  # before anything else
    ```

    It sets environment variables that JAX reads when it starts, the seeds of Python's and
    NumPy's global generators, and JAX's configuration, for the rest of the process. It also
    checks `PYTHONHASHSEED`, which only the shell can set, and names the processor. The runs
    still need the same keys, kind of device, number of devices and versions: see
    docs/determinism.md.

    **Arguments:**

    - `seed`: seeds the global generators of `random` and `numpy.random`.
    - `cpu_threads`: the number of threads among which XLA divides its work on a CPU. Bits may
        depend on this number. `None` means the number of cores.

    **Returns:** a `Recipe`, which prints as a table.

    **Raises:** `RuntimeError` if JAX has started without a setting that matters; `ValueError`
    if the environment contradicts a setting, or for an invalid seed or number of threads.
    Nothing is set in case of an error.
    """
    call = f"deterministic(seed={seed}, cpu_threads={cpu_threads})"
    threads = 1 if cpu_threads is None else cpu_threads
    are_ints = all(isinstance(n, int | np.integer) for n in (seed, threads))
    if not (are_ints and 0 <= seed < 2**32 and threads >= 1):
        raise ValueError(
            f"{call}: seed must be an int from 0 to 2**32 - 1, and cpu_threads from 1."
        )
    early = [
        (FLAG, "true", "no atomics, no algorithm that is chosen by timing it"),
        ("NCCL_NVLS_ENABLE", "0", "no sums in NVLink switches"),
    ]
    if cpu_threads is not None:
        early += [(THREADS, str(cpu_threads), "the same pieces of work on any number of cores")]
    seed = int(seed)  # `random.seed` refuses NumPy's integers
    # All settings are checked before the first one is set.
    settings = [Setting(n, v, _status(call, n, v), purpose) for n, v, purpose in early]
    for name, value, status, _ in settings:
        if status == SET and name == FLAG:
            flags = os.environ.get("XLA_FLAGS", "")
            os.environ["XLA_FLAGS"] = f"{flags} {name}={value}".strip()
        elif status == SET:
            os.environ[name] = value
    random.seed(seed)
    np.random.seed(seed)
    jax.config.update("jax_enable_pgle", False)
    hashes = os.environ.get("PYTHONHASHSEED", "random")
    fixed = "set in the shell" if hashes.isdigit() else "NOT FIXED: set it in the shell"
    settings += [
        Setting("random.seed", str(seed), "set", "Python's global generator"),
        Setting("numpy.random.seed", str(seed), "set", "NumPy's global generator"),
        Setting("jax_enable_pgle", "False", "set", "no compiling anew by measured times"),
        Setting("PYTHONHASHSEED", hashes, fixed, "the order in which sets of strings are read"),
        Setting("processor", _processor(), "inspected", "XLA compiles for its instructions"),
    ]
    return Recipe(tuple(settings))


def _status(call: str, name: str, value: str) -> str:
    """Returns the status of a setting that JAX reads when it starts; raises if too late."""
    flags = [flag.partition("=") for flag in os.environ.get("XLA_FLAGS", "").split()]
    environment = os.environ | {flag: value for flag, _, value in flags}
    actual = environment.get(name)
    if actual == value or (name == FLAG and actual in ("", "1", "True")):
        return "was set"
    if actual is not None:
        raise ValueError(
            f"{call}: the environment says {name}={actual}, but determinism needs "
            f"{name}={value}. Unset {name}, or set it to {value}."
        )
    if not _has_started():
        return SET
    backend = jax.default_backend()
    if name != THREADS and backend != "gpu":
        return "not set: no GPU here"
    raise RuntimeError(
        f"{call}: JAX has started already, with the backend {backend!r}, and would ignore "
        f"{name}={value}. Call deterministic before anything that starts JAX, such as "
        "jnp.zeros(()), jax.random.key(0) or jax.devices(), or set it in the shell."
    )


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _has_started() -> bool:
    # No public function returns this. But with a backend, JAX refuses to change this option.
    devices = jax.config.values["jax_num_cpu_devices"]
    try:
        jax.config.update("jax_num_cpu_devices", devices + 2)
    except RuntimeError:
        return True
    jax.config.update("jax_num_cpu_devices", devices)
    return False
