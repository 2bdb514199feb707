"""A layer in JAX as a program to be timed: several instances, and memory of its own.

One layer on a small array takes the device less time than it takes the host to call it. In a
network that is not so, since there a whole step is one call. So a program has several
instances of the layer, each on an x and dy of its own. A barrier keeps them apart, so that each
is what it would be alone: compiled for an H200, three move three times the bytes of one.

What a call gives is written over what the call before gave, which is donated: no memory is
asked for while the clock runs.
"""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from . import gpu_run_timing
from .benchmark_layers import BOTH, DTYPES, Pass
from .gpu_programs import DIRECTIONS, Program
from .gpu_run_contenders import Made, affine_of, with_affine
from .gpu_run_job import Problem, Shape
from .gpu_run_timing import Taken

# In a network the gradient of y comes after y.
PROGRAMS = {"forward": DIRECTIONS["forward"], BOTH: DIRECTIONS["forward, then backward"]}
KERNEL = "gpu.triton", "mosaic_gpu"

Given = tuple[Array, ...]  # x, or x and dy


class Compiled(NamedTuple):
    call: Any  # of leaves, given and what the call before wrote
    leaves: list[Array]
    written: Any
    arrays: int  # x, or x and dy
    with_kernel: bool


def flattened(program: Program, made: Made) -> tuple[Any, list[Array]]:
    """The program of (leaves, x, dy), and the leaves of layer and state."""
    arrays, static = eqx.partition(made.layer, eqx.is_array)
    leaves, structure = jax.tree.flatten((arrays, made.state))

    def of_leaves(leaves: list[Array], x: Array, dy: Any = None) -> Any:
        arrays, state = jax.tree.unflatten(structure, leaves)
        return program(eqx.combine(arrays, static), state, x, dy)

    return of_leaves, leaves


def differentiated(
    make: Callable[[int], Made], read: Callable[[Any, Any], Any] = lambda layer, state: None
) -> Callable[..., tuple[Any, ...]]:
    """Of (weight, bias, x, dy): y, dx, dweight, dbias, and what `read` finds in the state."""

    @jax.jit
    def run(weight: Array, bias: Array, x: Array, dy: Array) -> tuple[Any, ...]:
        made = make(x.shape[1])
        layer = with_affine(made.layer, weight, bias)
        y, state, (slope, dx) = PROGRAMS[BOTH](made.apply)(layer, made.state, x, dy)
        return y, dx, *affine_of(slope), read(made.layer, state)

    return run


def given_shapes(problem: Problem, pass_: Pass, instances: int) -> list[Any]:
    x = jax.ShapeDtypeStruct(problem.given, DTYPES[problem.dtype])
    return [(x, x) if pass_ == BOTH else (x,)] * instances


def repeated(program: Any) -> Any:
    """Of (leaves, given, written), for as many instances as there are in `given`."""

    @jax.jit  # traced once, and put into the program as often as there are instances
    def one(leaves: list[Array], *given: Array) -> list[Array]:
        return jax.tree.leaves(program(leaves, *given))

    def many(leaves: list[Array], given: list[Given], written: Any) -> list[list[Array]]:
        del written
        found: list[list[Array]] = []
        for arrays in given:
            if found:
                arrays, found[-1] = jax.lax.optimization_barrier((arrays, found[-1]))
            found.append(one(leaves, *arrays))
        return found

    return many


def compiled(made: Made, problem: Problem, pass_: Pass, instances: int) -> Compiled:
    program, leaves = flattened(PROGRAMS[pass_](made.apply), made)
    many = repeated(program)
    given = given_shapes(problem, pass_, instances)
    written = jax.eval_shape(many, leaves, given, None)
    # An argument that is not used is not passed on, unless kept, and has no memory to give.
    jitted = jax.jit(many, donate_argnums=2, keep_unused=True)
    lowered = jitted.lower(leaves, given, written)
    text = lowered.as_text()
    with_kernel = any(word in text for word in KERNEL)
    return Compiled(lowered.compile(), leaves, written, len(given[0]), with_kernel)


class Repeated:
    """A compiled program with its arrays, to be timed."""

    def __init__(self, compiled: Compiled, given: list[Given]):
        self.instances = len(given)
        # A pass that takes no dy is given none.
        self._compiled = compiled
        self._given = [arrays[: compiled.arrays] for arrays in given]
        self._written = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), compiled.written)

    def _call(self) -> None:
        call, leaves = self._compiled.call, self._compiled.leaves
        self._written = call(leaves, self._given, self._written)

    def time(self, calls: int) -> Taken:
        return gpu_run_timing.by_the_clock(self._call, self._wait, calls)

    def _wait(self) -> None:
        jax.block_until_ready(self._written)


class Noise:
    """Where the numbers of all problems come from: to draw them is more work than to time."""

    def __init__(self, problems: Iterable[Problem]):
        most = max(math.prod(problem.shape) for problem in problems)
        self._values = most + max(1, most // 7)  # so that the x and dy of the largest differ
        self._flat = jax.random.normal(jax.random.key(0), (self._values,))
        self._next = 0

    def _cut(self, problem: Problem) -> Array:
        size = math.prod(problem.shape)
        start = self._next % (self._values - size + 1)
        self._next += size // 3 + 101
        return _cut(self._flat, start, problem.given, DTYPES[problem.dtype])

    def given(self, problem: Problem, instances: int) -> list[Given]:
        """x, of mean 0.3, and dy."""
        return [(0.3 + self._cut(problem), self._cut(problem)) for _ in range(instances)]


@functools.partial(jax.jit, static_argnums=(2, 3))
def _cut(flat: Array, start: Any, shape: Shape, dtype: Any) -> Array:
    size = math.prod(shape)
    return jax.lax.dynamic_slice(flat, (start,), (size,)).reshape(shape).astype(dtype)
