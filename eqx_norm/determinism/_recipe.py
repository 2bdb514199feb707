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
        padded = (
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            for row in rows
        )
        return "\n".join(line.rstrip() for line in padded)


def deterministic(seed: int, *, cpu_threads: int | None = None) -> Recipe:
    """Makes this process give the same bits as any other that runs the same program.

    ```python
    from eqx_norm.determinism import deterministic

    print(deterministic(seed=0, cpu_threads=2))  # before anything else
    ```

    It sets what JAX reads when it starts, the seeds of Python's and NumPy's global generators,
    and JAX's configuration; looks at what cannot be set from here; and tells what each is for.
    The runs still need the same device, number of devices and versions: see
    `docs/determinism.md`. JAX's random numbers come from the program's keys; there is no hidden
    generator to seed. The settings stay for the rest of the process.

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
    if not 0 <= seed < 2**32:
        raise ValueError(f"{call}: NumPy's seeds are from 0 to 2**32 - 1.")
    if cpu_threads is not None and cpu_threads < 1:
        raise ValueError(f"{call}: it takes at least one thread.")
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
            flags = f"{os.environ.get('XLA_FLAGS', '')} {name}={value}"
            os.environ["XLA_FLAGS"] = flags.strip()
        elif status == SET:
            os.environ[name] = value
    random.seed(seed)
    np.random.seed(seed)
    jax.config.update("jax_enable_pgle", False)
    late = (
        Setting("random.seed", str(seed), "set", "Python's global generator"),
        Setting("numpy.random.seed", str(seed), "set", "NumPy's global generator"),
        Setting("jax_enable_pgle", "False", "set", "no compiling anew by measured times"),
    )
    return Recipe((*early, *late, *_found(cpu_threads)))


def _status(call: str, name: str, value: str, purpose: str) -> str:
    """Returns whether a setting is there, or can be: JAX reads it once, when it starts."""
    found, wanted = _environment(name), f"{name}={value}"
    if found == value:
        return "was set"
    if found is not None:
        raise ValueError(
            f"{call}: the environment says {name}={found}, and it takes {wanted} "
            f"({purpose}). Take the one out of the environment, or ask for the same."
        )
    flags = os.environ.get("XLA_FLAGS", "").strip()
    if name == FLAG and flags and not flags.startswith("-"):
        raise ValueError(
            f"{call}: XLA_FLAGS={flags!r} names a file, to which nothing can be added from "
            f"here. Write {wanted} into it."
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


def _environment(name: str) -> str | None:
    """Returns what the environment says of a variable, or of a flag of XLA's."""
    if name != FLAG:
        return os.environ.get(name)
    for flag in reversed(os.environ.get("XLA_FLAGS", "").split()):
        spelled, _, value = flag.partition("=")
        if spelled == name:
            return {"": "true", "1": "true"}.get(value, value.lower())
    return None


def _has_started() -> bool:
    """Returns whether JAX has a backend."""
    # It then refuses to change the number of its CPU devices, which is the one way to learn it
    # from public functions (jax 0.10.2 and 0.12.0.1).
    devices = jax.config.values["jax_num_cpu_devices"]
    try:
        jax.config.update("jax_num_cpu_devices", devices + 2)
    except RuntimeError:
        return True
    jax.config.update("jax_num_cpu_devices", devices)
    return False


def _found(cpu_threads: int | None) -> list[Setting]:
    """Returns the settings that can be looked at, and not set from here."""
    impl = str(jax.config.values["jax_default_prng_impl"])
    status = "checked" if impl == "threefry2x32" else "NOT FIXED: threefry2x32 is"
    hashes = os.environ.get("PYTHONHASHSEED", "random")
    fixed = "set in the shell" if hashes.isdigit() else "NOT FIXED: set it in the shell"
    found = [
        Setting("jax_default_prng_impl", impl, status, "a key's numbers, on any device"),
        Setting("PYTHONHASHSEED", hashes, fixed, "the order in which sets of strings are read"),
    ]
    if cpu_threads is None:
        has_affinity = hasattr(os, "sched_getaffinity")
        cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count()
        threads = os.environ.get(THREADS) or f"{cores} cores"
        status = "was set" if THREADS in os.environ else "NOT FIXED: cpu_threads=..."
        found.append(Setting(THREADS, threads, status, "the pieces of work on a CPU"))
    return found
