"""Makes programs to be timed of layers in JAX, and of what layers are measured by.

One layer on a small array takes a GPU less time than it takes the host to call it. In a network
that is not so, since there a whole step is one call. So there a program has several instances
of the layer, each on an x and dy of its own. A barrier keeps them apart, so that each is what
it would be alone: compiled for an H200, three move three times the bytes of one.

Every channel has to be summed up before any value can be normalised, so no batch norm has fewer
than five passes over x. Each of them is a compiled function, too, with nothing shared; together
they are "the sum of its parts", which a whole without waste comes close to. They run one after
the other, as in the whole: a pass that is repeated alone would find all of x in a cache of its
size, where the whole, which goes through four such arrays, does not.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from experiments.lab import peers
from experiments.lab.exact import EPS, Answer, Batch
from experiments.lab.passes import BOTH, INFERENCE, batch_norm, function
from experiments.lab.peers import Layer, names
from experiments.lab.timer import Program

from .cases import DTYPES, IN_TORCH, LAST, OWN, Problem, Shape

ROOFLINE = MEMORY_COPY, SUM_OF_PARTS = "memory copy", "sum of its parts"


class How(NamedTuple):
    """Says how a layer is made into a program."""

    instances: int = 1
    # Whether what a call gives is written over what the call before gave, which is donated: no
    # memory is asked for while the clock runs.
    in_place: bool = False
    # Whether, as in a network, dy is not there before y; and whether it is compiled ahead, so
    # that several may be at once. (Compiled ahead, a call costs the host more.)
    as_on_a_gpu: bool = False


class Built(NamedTuple):
    """Holds a layer as a program, without its arrays."""

    # Takes weight and bias, memory, what each instance is given, and what the call before
    # wrote; returns a list of what each instance gives.
    call: Any
    memory: Any
    written: Any  # as shapes


def layer(name: str, problem: Problem) -> Layer:
    """Returns the layer of that name for such an array."""
    if problem.rows:
        return peers.layer_norm(name, problem.shape[1:], eps=EPS)
    return batch_norm(name, problem.shape[1], channel_axis=-1 if moved(name, problem) else 1)


def unit_affine(channels: int) -> tuple[Array, Array]:
    """Returns the weight and bias that are timed."""
    return jnp.ones(channels), jnp.zeros(channels)


@functools.lru_cache(256)  # so that what agrees is not compiled again to be timed
def built(name: str, problem: Problem, pass_: str, how: How) -> Built:
    made = layer(name, problem)
    # In inference statistics are 1: those of no batch are 0/0 in some layers.
    memory = jax.tree.map(jnp.ones_like, made.memory) if pass_ == INFERENCE else made.memory
    one = function(made, pass_, apart=how.as_on_a_gpu)
    if how.instances > 1:  # it is traced once, and there as often
        one = jax.jit(one)

    def each(affine: Any, memory: Any, given: Any, written: Any) -> list[Any]:
        del written
        found: list[Any] = []
        for arrays in given:
            if found:
                arrays, found[-1] = jax.lax.optimization_barrier((arrays, found[-1]))
            found.append(one(affine, memory, *arrays))
        return found

    x = jax.ShapeDtypeStruct(given_shape(name, problem), DTYPES[problem.dtype])
    given = [(x, x) if pass_ == BOTH else (x,)] * how.instances
    arguments = unit_affine(problem.shape[1]), memory, given
    written = jax.eval_shape(each, *arguments, None) if how.in_place else None
    # An argument that is not used is not passed on, unless kept, and has no memory to give.
    jitted = jax.jit(each, donate_argnames="written", keep_unused=how.in_place)
    call = jitted.lower(*arguments, written).compile() if how.as_on_a_gpu else jitted
    return Built(call, memory, written)


def program(name: str, problem: Problem, pass_: str, how: How) -> Program:
    """Returns the program with its arrays."""
    if name in ROOFLINE:
        return _roofline(name, problem, pass_)
    call, memory, written = built(name, problem, pass_, how)
    arrays = drawn(given_shape(name, problem), problem.dtype, how.instances)
    given = [(x, dy) if pass_ == BOTH else (x,) for x, dy in arrays]
    parameters = unit_affine(problem.shape[1])
    results = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), written)

    def run() -> Any:
        nonlocal results
        found = call(parameters, memory, given, results)
        if how.in_place:
            results = found
        return found

    return Program(run, instances=how.instances)


@functools.lru_cache(2)  # the peers on one array share it, in either layout
def drawn(shape: Shape, dtype: str, instances: int = 1) -> list[tuple[Array, Array]]:
    """Returns x, of mean 0.3, and dy, for each instance."""
    keys = jax.random.split(jax.random.key(0), 2 * instances)
    arrays = [jax.random.normal(key, shape, DTYPES[dtype]) for key in keys]
    return [(0.3 + x, dy) for x, dy in zip(arrays[::2], arrays[1::2], strict=True)]


def answer(name: str, problem: Problem, given: Batch, how: How) -> Answer:
    """Returns what a layer gives for these numbers, forward and backward."""
    call, memory, *_ = built(name, problem, BOTH, how)
    x, dy, weight, bias = map(jnp.asarray, given)
    ((y, _, ((dweight, dbias), dx)),) = call((weight, bias), memory, [(x, dy)], None)
    y, *gradients = (np.asarray(v, np.float32) for v in (y, dx, dweight, dbias))
    return Answer(y, None, *gradients)


def moved(name: str, problem: Problem) -> bool:
    """Returns whether x has its channels last: Flax's default is that, and nobody else's."""
    if problem.layout == OWN:
        return names.package(name) == "flax"
    return problem.layout == LAST and name not in IN_TORCH  # which has a format for it


def given_shape(name: str, problem: Problem) -> Shape:
    """Returns the shape of x as a layer is given it."""
    if not moved(name, problem):
        return problem.shape
    batch, channels, *spatial = problem.shape
    if problem.layout == LAST:
        return batch * math.prod(spatial), channels
    return batch, *spatial, channels


# What layers are measured by.


def copy(size: int) -> Program:
    """Returns a copy of so many bytes, to where they were copied before."""
    x = jax.random.normal(jax.random.key(0), (size // 4,))
    # What is donated has the memory of what is returned.
    jitted = jax.jit(lambda x, old: -x, donate_argnums=1, keep_unused=True)
    result = jnp.zeros_like(x)

    def call() -> Any:
        nonlocal result
        result = jitted(x, result)
        return result

    return Program(call)


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


def _roofline(name: str, problem: Problem, pass_: str) -> Program:
    """Returns a copy of x, which is what it is whatever is done with x; or all passes."""
    ((x, dy),) = drawn(problem.shape, problem.dtype)
    if name == MEMORY_COPY:
        return Program(lambda: _negative(x))
    x, dy = (values.reshape(*values.shape[:2], -1) for values in (x, dy))
    a, b = unit_affine(x.shape[1])
    passes: list[Callable[[], Any]] = [
        lambda: _sum(x),
        lambda: _sums(x, x),
        lambda: _normalise(x, a, b),
    ]
    if pass_ == BOTH:
        passes += [lambda: _sums(dy, x), lambda: _gradient(x, dy, a, b)]
    return Program(lambda: [jax.block_until_ready(each()) for each in passes])
