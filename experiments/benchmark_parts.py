"""What batch norm + ReLU cannot do without: five passes over x, each on its own.

Every channel has to be summed up before any value can be normalised, so no program has fewer
passes than these. Each is a compiled function of its own, with nothing shared; together they
are "the sum of its parts", which a whole without waste comes close to.

They run one after the other, as in the whole: a pass that is repeated alone would find all
of x in a cache of its size, where the whole, which goes through four such arrays, does not.
"""

import jax
import jax.numpy as jnp
from jax import Array

from .benchmark_layers import DTYPES, Numbers, Pass, Program

COPY = "memory copy"
PARTS = "sum of its parts"


# Of x as [N, C, S]; sums in f32. (Two plain sums: XLA is faster at those than at one
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


def copy(given: Numbers, dtype: str) -> Program:
    """Reads x and writes as much; a copy proper would be optimised away."""
    x, negative = jnp.asarray(given.x).astype(DTYPES[dtype]), jax.jit(lambda x: -x)
    return Program(lambda: negative(x))


def parts(given: Numbers, dtype: str) -> dict[Pass, Program]:
    """The three passes forward, and all five."""
    x, dy = (
        jnp.asarray(a).astype(DTYPES[dtype]).reshape(*a.shape[:2], -1)
        for a in (given.x, given.dy)
    )
    a, b = jnp.asarray(given.weight), jnp.asarray(given.bias)
    wait = jax.block_until_ready

    def forward() -> tuple[Array, ...]:
        mean = wait(_sum(x))
        rest, square = wait(_sums(x, x))
        return mean, rest, square, wait(_normalise(x, a, b))

    def forward_and_backward() -> tuple[Array, ...]:
        y = forward()
        sums = wait(_sums(dy, x))
        return (*y, *sums, wait(_gradient(x, dy, a, b)))

    return {"forward": Program(forward), "forward + backward": Program(forward_and_backward)}
