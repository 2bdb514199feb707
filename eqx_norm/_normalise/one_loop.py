"""Computes vectors of one shape in one loop, where XLA would make a loop for each.

XLA:CPU (jax 0.10.2 and 0.12.0.1) compiles a loop for each array that a program returns, with
all the arithmetic that leads to it. For what a layer remembers that is eight loops, which take
longer to compile than the passes over x. A reduction of several arrays is one loop.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jaxtyping import Array


def in_one_loop(tree: Any) -> Any:
    """Returns the tree, whose arrays of one shape and dtype are one loop on a CPU.

    They have no derivatives. Complex numbers, which have no maximum, stay as they are.
    """
    leaves, structure = jax.tree.flatten(tree)
    alike: dict[Any, list[int]] = {}
    for i, leaf in enumerate(leaves):
        if not jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            kind = jax.typeof(leaf)
            key = kind.shape, kind.dtype, kind.sharding, kind.manual_axis_type.varying
            alike.setdefault(key, []).append(i)
    for places in alike.values():
        if len(places) > 1:
            together = IN_ONE_LOOP.bind(*(leaves[i] for i in places))
            for i, leaf in zip(places, together, strict=True):
                leaves[i] = leaf
    return jax.tree.unflatten(structure, leaves)


def _maxima(a: Any, b: Any) -> Any:
    return tuple(map(lax.max, a, b))


def written(*arrays: Array) -> Any:
    """Returns the arrays, of one shape and dtype, written to memory by one loop of XLA:CPU.

    A reduction stays where a barrier is gone when XLA fuses: each number becomes the larger of
    itself and itself, and whatever reads it does not compute it again.
    """
    twice = [jnp.broadcast_to(a, (2, *a.shape)) for a in arrays]
    least = [np.array(_least(a.dtype), a.dtype) for a in arrays]
    return lax.reduce(twice, least, _maxima, (0,))


def _least(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.floating):
        return -jnp.inf
    return jnp.iinfo(dtype).min if jnp.issubdtype(dtype, jnp.integer) else False


IN_ONE_LOOP = Primitive("eqx_norm_in_one_loop")
IN_ONE_LOOP.multiple_results = True
IN_ONE_LOOP.def_impl(lambda *arrays: arrays)
IN_ONE_LOOP.def_abstract_eval(lambda *arrays: arrays)
mlir.register_lowering(IN_ONE_LOOP, lambda context, *arrays: arrays)
mlir.register_lowering(IN_ONE_LOOP, mlir.lower_fun(written, True), "cpu")
# Of arrays of one shape, only some may be mapped.
batching.primitive_batchers[IN_ONE_LOOP] = lambda arrays, axes: (in_one_loop(arrays), axes)
