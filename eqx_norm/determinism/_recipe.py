"""`deterministic`: what makes two runs of one program give the same bits."""

import os
import random
from typing import NamedTuple

import jax
import numpy as np

# An unknown flag ends the process, so there is only this one, which stands for several others:
# XLA says that it "guarantees run-to-run determinism on GPU". Known to jaxlib 0.10.2 and
# 0.12.0.1; tests/test_determinism_recipe.py starts JAX with it.
FLAG = "--xla_gpu_deterministic_ops"
THREADS = "PJRT_NPROC"
SET = "set, for when JAX starts"


class Setting(NamedTuple):
    """One line of a `Recipe`."""

    name: str
    value: str
    status: str
    purpose: str


class Recipe(NamedTuple):
    """What `deterministic` has set, and what it has found: `print(recipe)` gives a table."""

    settings: tuple[Setting, ...]

    def __str__(self) -> str:
        rows = [("setting", "value", "status", "what for"), *self.settings]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        padded = (
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            for row in rows
        )
        return "\n".join(line.rstrip() for line in padded)


class _Variable(NamedTuple):
    """What is read once, when JAX starts: a variable of the environment, or a flag of XLA's."""

    name: str
    value: str
    backend: str
    purpose: str

    def found(self) -> str | None:
        """What the environment says now."""
        if not self.name.startswith("--"):
            return os.environ.get(self.name)
        for flag in reversed(os.environ.get("XLA_FLAGS", "").split()):
            name, _, value = flag.partition("=")
            if name == self.name:
                return {"": "true", "1": "true"}.get(value, value.lower())
        return None

    def set(self) -> None:
        if self.name.startswith("--"):
            flags = f"{os.environ.get('XLA_FLAGS', '')} {self.name}={self.value}"
            os.environ["XLA_FLAGS"] = flags.strip()
        else:
            os.environ[self.name] = self.value


def deterministic(seed: int, *, cpu_threads: int | None = None) -> Recipe:
    """Makes this process give the same bits as any other that runs the same program.

    ```python
    from eqx_norm.determinism import deterministic

    print(deterministic(seed=0, cpu_threads=2))  # before anything else
    ```

    It sets what JAX reads when it starts, the seeds of Python's and NumPy's global generators,
    and JAX's configuration; looks at what cannot be set from here; and says of each what it is
    for. The same device, the same number of devices and the same versions are still needed:
    `docs/determinism.md` has what was measured. JAX has no hidden generator to seed: its
    random numbers are those of the keys that the program makes.

    It is a function, not a context: what JAX has read when it started stays as it is, so there
    could be no end of a block after which it would be undone.

    **Arguments:**

    - `seed`: for Python's `random` and for `numpy.random`, where code uses them without a
        generator of its own.
    - `cpu_threads`: the number of threads by which XLA cuts up its work on a CPU. Without it,
        that is the number of cores, and with another number the bits may be others.

    **Returns:** a `Recipe`, which prints as a table.

    **Raises:** `RuntimeError` where JAX has started already, without a setting that matters;
    `ValueError` where the environment says otherwise, and for a seed or a number of threads
    that is none. Then nothing has been changed.
    """
    call = f"deterministic(seed={seed}, cpu_threads={cpu_threads})"
    if not 0 <= seed < 2**32:
        raise ValueError(f"{call}: NumPy's seeds are from 0 to 2**32 - 1.")
    if cpu_threads is not None and cpu_threads < 1:
        raise ValueError(f"{call}: it takes at least one thread.")
    variables = _variables(cpu_threads)
    statuses = [_status(call, variable) for variable in variables]
    for variable, status in zip(variables, statuses, strict=True):
        if status == SET:
            variable.set()
    random.seed(seed)
    np.random.seed(seed)
    jax.config.update("jax_enable_pgle", False)
    early = [
        Setting(variable.name, variable.value, status, variable.purpose)
        for variable, status in zip(variables, statuses, strict=True)
    ]
    return Recipe((*early, *_set(seed), *_found(cpu_threads)))


def _variables(cpu_threads: int | None) -> list[_Variable]:
    ops = "no atomics, no algorithm that is chosen by timing it"
    variables = [
        _Variable(FLAG, "true", "gpu", ops),
        _Variable("NCCL_NVLS_ENABLE", "0", "gpu", "no sums in NVLink switches"),
    ]
    if cpu_threads is not None:
        pieces = "the same pieces of work on any number of cores"
        variables.append(_Variable(THREADS, str(cpu_threads), "cpu", pieces))
    return variables


def _status(call: str, variable: _Variable) -> str:
    found, wanted = variable.found(), f"{variable.name}={variable.value}"
    if found == variable.value:
        return "was set"
    if found is not None:
        raise ValueError(
            f"{call}: the environment says {variable.name}={found}, and it takes {wanted} "
            f"({variable.purpose}). Take the one out of the environment, or ask for the same."
        )
    flags = os.environ.get("XLA_FLAGS", "").strip()
    if variable.name == FLAG and flags and not flags.startswith("-"):
        raise ValueError(
            f"{call}: XLA_FLAGS={flags!r} names a file, to which nothing can be added from "
            f"here. Write {wanted} into it."
        )
    if not _has_started():
        return SET
    backend = jax.default_backend()
    if variable.backend not in ("cpu", backend):
        return f"not set: no {variable.backend.upper()} here"
    raise RuntimeError(
        f"{call}: JAX has started already, with the backend {backend!r}, and {wanted} "
        f"({variable.purpose}) would not be read any more. Call deterministic before the first "
        "jnp.zeros(()), jax.random.key(0) or jax.devices(), each of which starts it, or set it "
        "in the shell."
    )


def _has_started() -> bool:
    """Whether JAX has a backend. It then refuses to change the number of its CPU devices,
    which is the one way to learn it from public functions (jax 0.10.2 and 0.12.0.1)."""
    devices = jax.config.values["jax_num_cpu_devices"]
    try:
        jax.config.update("jax_num_cpu_devices", devices + 2)
    except RuntimeError:
        return True
    jax.config.update("jax_num_cpu_devices", devices)
    return False


def _set(seed: int) -> list[Setting]:
    return [
        Setting("random.seed", str(seed), "set", "Python's global generator"),
        Setting("numpy.random.seed", str(seed), "set", "NumPy's global generator"),
        Setting("jax_enable_pgle", "False", "set", "no compiling anew by measured times"),
    ]


def _found(cpu_threads: int | None) -> list[Setting]:
    """What there is to look at only."""
    impl = jax.config.values["jax_default_prng_impl"]
    same = impl == "threefry2x32"
    hashes = os.environ.get("PYTHONHASHSEED", "random")
    fixed = "set in the shell" if hashes.isdigit() else "NOT FIXED: set it in the shell"
    found = [
        Setting(
            "jax_default_prng_impl",
            str(impl),
            "checked" if same else "NOT FIXED: threefry2x32 is",
            "a key's numbers, on any device",
        ),
        Setting("PYTHONHASHSEED", hashes, fixed, "the order in which sets of strings are read"),
    ]
    if cpu_threads is None:
        threads = os.environ.get(THREADS) or f"{_cores()} cores"
        of_cores = "NOT FIXED: cpu_threads=..." if THREADS not in os.environ else "was set"
        found.append(Setting(THREADS, threads, of_cores, "the pieces of work on a CPU"))
    return found


def _cores() -> int | None:
    has_affinity = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count()
