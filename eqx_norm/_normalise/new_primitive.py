"""How a function becomes a primitive of JAX, with implementations of its own by platform.

Here, in `primitives`, `derivatives` and `invariant`, and of this package else only in
`determinism`, JAX's interface for new primitives is used (`jax.extend.core`,
`jax.interpreters`), which may change: checked with jax 0.10.2 and 0.12.0.1, and by
tests/test_primitives.py.
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

from .gpu import choice as kernels
from .invariant import Across

Shapes = list[tuple[tuple[int, ...], Any]]
Compute = Callable[..., Sequence[Array]]


def new_primitive(
    name: str,
    compute: Compute,
    on_cpu: Compute,
    shapes: Callable[..., Shapes],
    full: Sequence[int],
    kernel: Callable[..., Compute | None] | None = None,
    invariant: Compute | None = None,
) -> Primitive:
    """A primitive that computes `compute(*arrays, **parameters)`, or `on_cpu` on a CPU.

    `shapes` gives shape and dtype of each result. All arrays have the same number of axes; a
    mapped one is put in front of them. `full` are the arrays that need it in full, where size
    1 will do for the others; a parameter `shape` gets it, too.

    A parameter `implementation` says whether a kernel is wanted: on a CUDA device,
    `kernel(implementation, partitioned, *arrays, **parameters)`, given arrays without their
    values, is what to compute instead, or `None`. For the implementation `Across`, all
    platforms compute `invariant`.
    """
    primitive = Primitive(f"eqx_norm_{name}")
    primitive.multiple_results = True

    def lower(function: Compute, context: Any, *arrays: Any, **parameters: Any) -> Any:
        implementation = parameters.pop("implementation", "auto")
        if invariant is not None and isinstance(implementation, Across):
            function = invariant
        else:
            _refuse_kernels(implementation, kernel is not None)
        return mlir.lower_fun(function, multiple_results=True)(context, *arrays, **parameters)

    def lower_for_cuda(
        context: Any, *arrays: Any, implementation: Any = "auto", **parameters: Any
    ) -> Any:
        if isinstance(implementation, Across):
            return lower(compute, context, *arrays, implementation=implementation, **parameters)
        # `jax.export` refuses kernels, unless it is told to trust them.
        if implementation == "auto" and context.module_context.lowering_parameters.for_export:
            implementation = "xla"
        chosen = kernel and kernel(
            implementation, _is_partitioned(context), *context.avals_in, **parameters
        )
        lowered = mlir.lower_fun(chosen or compute, multiple_results=True)
        with kernels.quiet():
            return lowered(context, *arrays, **parameters)

    mlir.register_lowering(primitive, functools.partial(lower, compute))
    mlir.register_lowering(primitive, functools.partial(lower, on_cpu), platform="cpu")
    mlir.register_lowering(primitive, lower_for_cuda, platform="cuda")

    @functools.lru_cache
    def compiled(**parameters: Any) -> Callable[..., Any]:
        return jax.jit(functools.partial(primitive.bind, **parameters))

    @primitive.def_impl
    def _(*arrays: Array, **parameters: Any) -> Any:
        # Under `jax.disable_jit` it would be this very rule again that is called.
        with jax.disable_jit(False):
            return compiled(**parameters)(*arrays)

    @primitive.def_abstract_eval
    def _(*arrays: Any, implementation: Any = "auto", **parameters: Any) -> list[Any]:
        del implementation
        if len({_varying(array) for array in arrays}) > 1:
            raise TypeError(
                f"{primitive} was given arrays that vary over different axes of a mesh, "
                f"{', '.join(map(str, arrays))}: its derivatives would be wrong. Bind it by "
                "new_primitive.bind, which aligns them."
            )
        # `update` keeps the mesh axes over which an abstract value varies.
        return [
            arrays[0].update(
                shape=shape, dtype=dtype, weak_type=False, sharding=_sharding(arrays, shape)
            )
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
    """Returns the primitive's results for the arrays that there are, `aligned`."""
    return primitive.bind(*aligned(*(a for a in arrays if a is not None)), **parameters)


def aligned(*arrays: Array) -> list[Array]:
    """Returns the arrays, all of them varying over the axes of a mesh over which any does.

    As for JAX's own primitives: inside `shard_map`, the type of an array says whether it may
    differ from device to device, and the transpose of "may differ from now on" is a sum over
    the devices. An array which is made on the way, of zeros for example, has a type of its own.
    """
    varying = [_varying(jax.typeof(array)) for array in arrays]
    axes = frozenset[Any]().union(*varying)
    return [
        array if own == axes else lax.pcast(array, tuple(axes - own), to="varying")
        for array, own in zip(arrays, varying, strict=True)
    ]


def like(array: Array, shape: tuple[int, ...], dtype: Any) -> Any:
    """Returns an abstract array of `shape` and `dtype`, varying over a mesh as `array` does."""
    aval: Any = jax.typeof(array)
    sharding = _sharding([aval], shape)
    return aval.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)


def _varying(aval: Any) -> frozenset[Any]:
    return aval.manual_axis_type.varying


def _sharding(arrays: Sequence[Any], shape: tuple[int, ...]) -> Any:
    """Where a mesh has explicit axes: that of an operand of this shape; sums have none."""
    alike = [array.sharding for array in arrays if array.shape == shape]
    unsharded = jax.sharding.PartitionSpec(*[None] * len(shape))
    return alike[0] if alike else arrays[0].sharding.update(spec=unsharded)


def _refuse_kernels(implementation: Any, has_kernel: bool) -> None:
    if has_kernel and implementation not in ("auto", "xla"):
        raise ValueError(
            f"implementation={implementation!r} is for CUDA devices, and this program is "
            "compiled for another. implementation='auto' takes the kernel where it serves and "
            "XLA elsewhere."
        )


def _is_partitioned(context: Any) -> bool:
    """Whether XLA will split the program over devices: not so on one, nor in `shard_map`."""
    axes = context.module_context.axis_context
    if hasattr(axes, "manual_axes"):
        return frozenset(axes.manual_axes) != frozenset(axes.mesh.axis_names)
    return (getattr(axes, "num_devices", None) or 1) > 1
