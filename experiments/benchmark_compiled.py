"""What compiling tells: the temporaries of a program, exactly, and how long it takes."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax


class Compiled(NamedTuple):
    seconds: float  # to trace, lower and compile
    temporaries: int  # bytes


@contextmanager
def no_cache() -> Iterator[None]:
    """Without compiled programs from earlier runs, where JAX has been told to keep them."""
    switch = "jax_enable_compilation_cache"
    before = getattr(jax.config, switch)
    jax.config.update(switch, False)
    try:
        yield
    finally:
        jax.config.update(switch, before)


def compiled(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Compiled:
    """`function` has to be a fresh one; what JAX has traced of others before is forgotten,
    so that nobody gains from the order."""
    jax.clear_caches()
    with no_cache():
        start = time.perf_counter()
        program = jax.jit(function).lower(*arguments).compile()
        seconds = time.perf_counter() - start
    analysis = program.memory_analysis()
    if analysis is None:
        raise RuntimeError(f"{jax.default_backend()} does not tell what memory programs need")
    return Compiled(seconds, analysis.temp_size_in_bytes)
