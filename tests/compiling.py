"""Compiles for tests that ask what a function is, and not how fast or by what instructions.

XLA:CPU spends most of a test's time on making a program of a few numbers fast. Without that it
takes a fifth. Tests of bits, of accuracy, of memory and of the compiled program itself compile
by `jax.jit` and `eqx.filter_jit`, as users do.
"""

import functools
from typing import Any

import equinox as eqx
import jax

OPTIONS: dict[str, Any] = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_parallel_codegen_split_count": 1,
}
if jax.__version_info__ < (0, 12):  # later versions have no choice left
    OPTIONS["xla_cpu_use_fusion_emitters"] = False
# These options as a variable of a process that is started by a test.
XLA_FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in OPTIONS.items())

jit = functools.partial(jax.jit, compiler_options=OPTIONS)


def filter_jit(function: Any) -> Any:
    """Returns `eqx.filter_jit(function)` with options, which its annotations leave out."""
    options: Any = {"compiler_options": OPTIONS}
    return eqx.filter_jit(function, **options)
