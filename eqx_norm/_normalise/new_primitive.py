"""How a function becomes a primitive of JAX, with an implementation of its own for the CPU.

Here and in `primitives`, and only here, JAX's interface for new primitives is used
(`jax.extend.core`, `jax.interpreters`), which may change: checked with jax 0.10.2 and 0.12.0.1,
and by tests/test_primitives.py.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jaxtyping import Array

Shapes = list[tuple[tuple[int, ...], Any]]


def new_primitive(
    name: str,
    compute: Callable[..., Sequence[Array]],
    on_cpu: Callable[..., Sequence[Array]],
    shapes: Callable[..., Shapes],
    full: Sequence[int],
) -> Primitive:
    """A primitive that computes `compute(*arrays, **parameters)`, or `on_cpu` on a CPU.

    `shapes` gives shape and dtype of each result. All arrays have the same number of axes; a
    mapped one is put in front of them. `full` are the arrays that need it in full, where size
    1 will do for the others; a parameter `shape` gets it, too.
    """
    primitive = Primitive(f"eqx_norm_{name}")
    primitive.multiple_results = True
    mlir.register_lowering(primitive, mlir.lower_fun(compute, multiple_results=True))
    mlir.register_lowering(
        primitive, mlir.lower_fun(on_cpu, multiple_results=True), platform="cpu"
    )

    @functools.lru_cache
    def compiled(**parameters: Any) -> Callable[..., Any]:
        return jax.jit(functools.partial(primitive.bind, **parameters))

    @primitive.def_impl
    def _(*arrays: Array, **parameters: Any) -> Any:
        return compiled(**parameters)(*arrays)

    @primitive.def_abstract_eval
    def _(*arrays: Any, **parameters: Any) -> list[Any]:
        # `update` keeps the mesh axes over which an abstract value varies.
        return [
            arrays[0].update(shape=shape, dtype=dtype, weak_type=False)
            for shape, dtype in shapes(*arrays, **parameters)
        ]

    def batch(arrays: Any, axes: Any, **parameters: Any) -> tuple[Any, list[int]]:
        size = next(a.shape[i] for a, i in zip(arrays, axes, strict=True) if i is not None)
        arrays = [
            array[None] if axis is None else jnp.moveaxis(array, axis, 0)
            for array, axis in zip(arrays, axes, strict=True)
        ]
        for i in full:
            arrays[i] = jnp.broadcast_to(arrays[i], (size, *arrays[i].shape[1:]))
        if "shape" in parameters:
            parameters["shape"] = (size, *parameters["shape"])
        results = primitive.bind(*arrays, **parameters)
        return results, [0] * len(results)

    batching.primitive_batchers[primitive] = batch
    return primitive


def bind(primitive: Primitive, *arrays: Array | None, **parameters: Any) -> list[Array]:
    """Its results for the arrays that there are.

    As for JAX's own primitives, arrays that vary over different axes of a mesh are first made
    to vary over the same.
    """
    present = [array for array in arrays if array is not None]
    varying = [jax.typeof(array).manual_axis_type.varying for array in present]
    axes = frozenset[Any]().union(*varying)
    present = [
        array if own == axes else lax.pcast(array, tuple(axes - own), to="varying")
        for array, own in zip(present, varying, strict=True)
    ]
    return primitive.bind(*present, **parameters)
