"""Makes programs to be timed of layers in JAX: forward, and forward and backward.

One layer on a small array takes a GPU less time than it takes the host to call it. In a network
that is not so, since there a whole step is one call. So there a program has several instances
of the layer, each on an x and dy of its own. A barrier keeps them apart, so that each is what
it would be alone: compiled for an H200, three move three times the bytes of one.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from experiments.lab import peers
from experiments.lab.exact import EPS, Answer, Batch
from experiments.lab.passes import BOTH, FORWARD, batch_norm, function
from experiments.lab.peers import Layer, names
from experiments.lab.timer import Program

from .cases import DTYPES, LAST, OWN, Problem, Shape

KERNEL = "gpu.triton", "mosaic_gpu"  # in the text of a program that has one


class How(NamedTuple):
    """Says how a layer is made into a program."""

    instances: int = 1
    # Whether what a call gives is written over what the call before gave, which is donated: no
    # memory is asked for while the clock runs.
    in_place: bool = False
    # Whether, as in a network, dy is not there before y; and whether it is compiled ahead, so
    # that several may be at once. (Compiled ahead, a call costs the host more.)
    as_on_a_gpu: bool = False


def layer(name: str, problem: Problem) -> Layer:
    """Returns the layer of that name for such an array."""
    if problem.rows:
        return peers.layer_norm(name, problem.shape[1:], eps=EPS)
    return batch_norm(name, problem.shape[1], channel_axis=-1 if _moved(name, problem) else 1)


def stack(made: Layer, depth: int, channel_axis: int) -> Layer:
    """Returns so many blocks of a linear layer and this one, as one layer.

    The linear layer is over the channels, a convolution of size 1: what stands between two
    norms in a network, and keeps XLA from fusing them.
    """

    def train(affines: Any, memories: Any, x: Array) -> tuple[Array, Any]:
        after = []
        for affine, memory in zip(affines, memories, strict=True):
            matrix = jnp.outer(affine[0], affine[0]).astype(x.dtype) / len(affine[0])
            x = jnp.moveaxis(jnp.tensordot(x, matrix, (channel_axis, 0)), -1, channel_axis)
            x, memory = made.train(affine, memory, x)
            after.append(memory)
        return x, tuple(after)

    memories: Any = (made.memory,) * depth
    return made._replace(memory=memories, train=train)


class Built(NamedTuple):
    """Holds a layer as a program, without its arrays."""

    # Takes weight and bias, memory, what each instance is given, and what the call before
    # wrote; returns a list of what each instance gives.
    call: Any
    memory: Any
    affine: Any  # ones and zeros
    written: Any  # as shapes
    note: str


@functools.lru_cache(512)  # more than are compiled together
def built(name: str, problem: Problem, pass_: str, how: How) -> Built:
    made = layer(name, problem)
    affine = jnp.ones(problem.shape[1]), jnp.zeros(problem.shape[1])
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
    given = [(x,) if pass_ == FORWARD else (x, x)] * how.instances
    arguments = affine, made.memory, given
    written = jax.eval_shape(each, *arguments, None) if how.in_place else None
    # An argument that is not used is not passed on, unless kept, and has no memory to give.
    jitted = jax.jit(each, donate_argnames="written", keep_unused=how.in_place)
    if not how.as_on_a_gpu:
        return Built(jitted, made.memory, affine, written, "")
    lowered = jitted.lower(*arguments, written)
    note = "with a kernel" if any(word in lowered.as_text() for word in KERNEL) else ""
    return Built(lowered.compile(), made.memory, affine, written, note)


def program(name: str, problem: Problem, pass_: str, how: How) -> Program:
    """Returns the program with its arrays."""
    call, memory, affine, written, note = built(name, problem, pass_, how)
    arrays = drawn(given_shape(name, problem), problem.dtype, how.instances)
    given = [(x,) if pass_ == FORWARD else (x, dy) for x, dy in arrays]
    results = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), written)

    def call_in_place() -> Any:
        nonlocal results
        results = call(affine, memory, given, results)
        return results

    def call_anew() -> Any:
        return call(affine, memory, given, None)

    return Program(
        call_in_place if how.in_place else call_anew, instances=how.instances, note=note
    )


@functools.lru_cache(2)  # the peers on one array share it, in either layout
def drawn(shape: Shape, dtype: str, instances: int = 1) -> list[tuple[Array, Array]]:
    """Returns x, of mean 0.3, and dy, for each instance."""
    keys = jax.random.split(jax.random.key(0), 2 * instances)
    arrays = [jax.random.normal(key, shape, DTYPES[dtype]) for key in keys]
    return [(0.3 + x, dy) for x, dy in zip(arrays[::2], arrays[1::2], strict=True)]


def answer(name: str, problem: Problem, given: Batch, how: How) -> Answer:
    """Returns what a layer gives for these numbers, forward and backward."""
    call, memory, *_ = built(name, problem, BOTH, how)
    affine = jnp.asarray(given.weight), jnp.asarray(given.bias)
    x, dy = (placed(name, problem, values) for values in (given.x, given.dy))
    ((y, _, ((dweight, dbias), dx)),) = call(affine, memory, [(x, dy)], None)
    y, dx = (back(name, problem, values) for values in (y, dx))
    return Answer(y, None, dx, np.asarray(dweight), np.asarray(dbias))


def _moved(name: str, problem: Problem) -> bool:
    """Returns whether x has its channels last: Flax's default is that, and nobody else's."""
    own = problem.layout == OWN and names.package(name) == "flax"
    return own or problem.layout == LAST


def given_shape(name: str, problem: Problem) -> Shape:
    """Returns the shape of x as a layer in JAX is given it."""
    if not _moved(name, problem):
        return problem.shape
    batch, channels, *spatial = problem.shape
    if problem.layout == LAST:
        return batch * math.prod(spatial), channels
    return batch, *spatial, channels


def placed(name: str, problem: Problem, values: NDArray[Any]) -> Array:
    """Returns values of the problem's shape as a layer in JAX is given them."""
    if _moved(name, problem):
        values = np.moveaxis(values, 1, -1)
    return jnp.asarray(values.reshape(given_shape(name, problem)))


def back(name: str, problem: Problem, values: Array) -> NDArray[np.float32]:
    """Returns what `placed` took."""
    array = np.asarray(values, np.float32)
    if not _moved(name, problem):
        return array
    batch, channels, *spatial = problem.shape
    return np.moveaxis(array.reshape(batch, *spatial, channels), -1, 1)
