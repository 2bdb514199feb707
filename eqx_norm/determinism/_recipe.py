"""`deterministic` sets what makes two runs of one program give the same bits."""

import os
import random
from typing import NamedTuple

import jax
import numpy as np

# An unknown flag ends the process, so there is only this one, which stands for several others:
# XLA says that it "guarantees run-to-run determinism on GPU". Known to jaxlib 0.10.2 and
# 0.12.0.1; tests/determinism/test_recipe.py starts JAX with it.
FLAG = "--xla_gpu_deterministic_ops"
THREADS = "PJRT_NPROC"
SET = "set, for when JAX starts"


class Setting(NamedTuple):
    """Holds one line of a `Recipe`."""

    name: str
    value: str
    status: str
    purpose: str


class Recipe(NamedTuple):
    """Holds what `deterministic` has set and found: `print(recipe)` gives a table."""

    settings: tuple[Setting, ...]

    def __str__(self) -> str:
        rows = [("setting", "value", "status", "what for"), *self.settings]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def deterministic(seed: int, *, cpu_threads: int | None = None) -> Recipe:
    """Makes this process give the same bits as any other that runs the same program.

    ```python
    from eqx_norm.determinism import deterministic

    print(deterministic(seed=0, cpu_threads=2))  # before anything else
    ```

    It sets what JAX reads when it starts, the seeds of Python's and NumPy's global generators,
    and JAX's configuration, for the rest of the process; looks at what cannot be set from here;
    and tells what each is for. The runs still need the same keys, device, number of devices and
    versions: see `docs/determinism.md`.

    **Arguments:**

    - `seed`: for Python's `random` and for `numpy.random`, where code uses them without a
        generator of its own.
    - `cpu_threads`: the number of threads by which XLA cuts up its work on a CPU, on which bits
        may depend; the number of cores if `None`.

    **Returns:** a `Recipe`, which prints as a table.

    **Raises:** `RuntimeError` where JAX has started already, without a setting that matters;
    `ValueError` where the environment says otherwise, and for a wrong seed or number of
    threads. Nothing is changed then.
    """
    call = f"deterministic(seed={seed}, cpu_threads={cpu_threads})"
    if not 0 <= seed < 2**32 or (cpu_threads is not None and cpu_threads < 1):
        raise ValueError(f"{call}: seeds are from 0 to 2**32 - 1, threads from 1.")
    wanted = [
        (FLAG, "true", "no atomics, no algorithm that is chosen by timing it"),
        ("NCCL_NVLS_ENABLE", "0", "no sums in NVLink switches"),
    ]
    if cpu_threads is not None:
        pieces = "the same pieces of work on any number of cores"
        wanted.append((THREADS, str(cpu_threads), pieces))
    # All are looked at, and may be errors, before the first is set.
    early = [
        Setting(name, value, _status(call, name, value, purpose), purpose)
        for name, value, purpose in wanted
    ]
    for name, value, status, _ in early:
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
    late = (
        Setting("random.seed", str(seed), "set", "Python's global generator"),
        Setting("numpy.random.seed", str(seed), "set", "NumPy's global generator"),
        Setting("jax_enable_pgle", "False", "set", "no compiling anew by measured times"),
        Setting("PYTHONHASHSEED", hashes, fixed, "the order in which sets of strings are read"),
    )
    return Recipe((*early, *late))


def _status(call: str, name: str, value: str, purpose: str) -> str:
    """Returns whether a setting is there, or can be: JAX reads it once, when it starts."""
    flags = [flag.partition("=") for flag in os.environ.get("XLA_FLAGS", "").split()]
    given = {**os.environ, **{flag: value for flag, _, value in flags}}
    found, wanted = given.get(name), f"{name}={value}"
    if found == value or (name == FLAG and found in ("", "1", "True")):
        return "was set"
    if found is not None:
        raise ValueError(
            f"{call}: the environment says {name}={found}, and it takes {wanted} "
            f"({purpose}). Unset it, or ask for the same."
        )
    if not _has_started():
        return SET
    backend = jax.default_backend()
    if name != THREADS and backend != "gpu":
        return "not set: no GPU here"
    raise RuntimeError(
        f"{call}: JAX has started already, with the backend {backend!r}, and {wanted} "
        f"({purpose}) would not be read any more. Call deterministic before the first "
        "jnp.zeros(()), jax.random.key(0) or jax.devices(), each of which starts it, or set it "
        "in the shell."
    )


def _has_started() -> bool:
    """Returns whether JAX has a backend."""
    # It then refuses to change the number of its CPU devices: no public function tells.
    devices = jax.config.values["jax_num_cpu_devices"]
    try:
        jax.config.update("jax_num_cpu_devices", devices + 2)
    except RuntimeError:
        return True
    jax.config.update("jax_num_cpu_devices", devices)
    return False
