"""Makes what layers are measured by: copies, and the passes that batch norm needs.

Every channel has to be summed up before any value can be normalised, so no program has fewer
than five passes over x. Each is a compiled function of its own, with nothing shared; together
they are "the sum of its parts", which a whole without waste comes close to.

They run one after the other, as in the whole: a pass that is repeated alone would find all of
x in a cache of its size, where the whole, which goes through four such arrays, does not.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from experiments.lab.timer import Program

from .cases import FORWARD, Problem
from .programs import How, drawn

NAMES = MEMORY_COPY, PARTS = "memory copy", "sum of its parts"


# All take x as [N, C, S], and sum in f32. (XLA is faster at two plain sums than at one
# reduction to two results.)
@jax.jit
def _sum(x: Array) -> Array:
    return x.astype(jnp.float32).sum((0, 2))


@jax.jit
def _sums(x: Array, y: Array) -> tuple[Array, Array]:
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    return x.sum((0, 2)), (x * y).sum((0, 2))


@jax.jit
def _normalise(x: Array, a: Array, b: Array) -> Array:
    return jax.nn.relu(x * a[:, None] + b[:, None]).astype(x.dtype)


@jax.jit
def _gradient(x: Array, dy: Array, a: Array, b: Array) -> Array:
    return (dy * a[:, None] + x * b[:, None] + b[:, None]).astype(x.dtype)


@jax.jit
def _negative(x: Array) -> Array:  # reads x and writes as much; a copy would be optimised away
    return -x


def program(name: str, problem: Problem, pass_: str, how: How) -> Program:
    """Returns a copy of x, which is what it is whatever is done with x; or all passes."""
    del how  # one instance, with new results
    ((x, dy),) = drawn(problem.shape, problem.dtype)
    if name == MEMORY_COPY:
        return Program(lambda: _negative(x))
    x, dy = (values.reshape(*values.shape[:2], -1) for values in (x, dy))
    a, b = jnp.ones(x.shape[1]), jnp.zeros(x.shape[1])
    passes: list[Callable[[], Any]] = [
        lambda: _sum(x),
        lambda: _sums(x, x),
        lambda: _normalise(x, a, b),
    ]
    if pass_ != FORWARD:
        passes += [lambda: _sums(dy, x), lambda: _gradient(x, dy, a, b)]
    return Program(lambda: [jax.block_until_ready(each()) for each in passes])


def copy_in_place(function: Callable[[Array], Array], size: int) -> Program:
    """Returns what copies so many bytes to where they were copied before."""
    x = jax.random.normal(jax.random.key(0), (size // 4,))
    # What is donated has the memory of what is returned.
    jitted = jax.jit(lambda x, old: function(x), donate_argnums=1, keep_unused=True)
    result = jnp.zeros_like(x)

    def call() -> Any:
        nonlocal result
        result = jitted(x, result)
        return result

    return Program(call)
