"""Compiles without optimisation, for tests of values to a tolerance.

XLA:CPU spends most of a test's time on optimising small programs: without it a test takes a
fifth. Tests of bits, accuracy, memory and the compiled program use `jax.jit` and
`eqx.filter_jit`, as users do. In a file with `UNOPTIMISED = True` (conftest.py) no program is
optimised, nor is any operation outside of programs.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import jax.export
from jax._src import compiler

OPTIONS: dict[str, Any] = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_parallel_codegen_split_count": 1,
}
if jax.__version_info__ < (0, 12):  # later versions lack the option
    OPTIONS["xla_cpu_use_fusion_emitters"] = False
# The options as an environment variable for processes that tests start.
XLA_FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in OPTIONS.items())

jit = functools.partial(jax.jit, compiler_options=OPTIONS)


def filter_jit(function: Any) -> Any:
    """Returns `eqx.filter_jit(function)` with options, which its annotations leave out."""
    options: Any = {"compiler_options": OPTIONS}
    return eqx.filter_jit(function, **options)


@contextlib.contextmanager
def unoptimised() -> Iterator[None]:
    """Compiles without optimisation whatever is compiled meanwhile.

    JAX has no public setting for `OPTIONS`. With them one operation outside of programs
    compiles in 20 ms, by `jax_disable_most_optimizations` alone in 40 (jax 0.10.2). If the
    private function moves, every file with `UNOPTIMISED = True` fails.
    """

    def compile_options(*args: Any, **kwargs: Any) -> Any:
        options = of_jax(*args, **kwargs)
        options.env_option_overrides += list(OPTIONS.items())
        return options

    of_jax = compiler.get_compile_options
    compiler.get_compile_options = compile_options
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", False)
        compiler.get_compile_options = of_jax


def lowered_for(platform: str, function: Any) -> Any:
    """Returns the function as it is lowered for another platform, for this one to run: XLA's
    operations are the same for all, unless a kernel is among them."""
    checks: Any = [jax.export.DisabledSafetyCheck.platform()]
    export = jax.export.export(jax.jit(function), platforms=[platform], disabled_checks=checks)

    def call(*arguments: Any) -> Any:
        like = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), arguments)
        return export(*like).call(*arguments)

    return jax.jit(call)
