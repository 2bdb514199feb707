"""How a function becomes a primitive of JAX, with implementations of its own by platform.

A pass over x takes x as the caller has it, `(*mapped, channels, *spatial)`, so that x is kept
once for the backward pass, in that form. When a program is lowered, arrays are flattened to
`(*mapped, channels, values)`, because loops follow an array's axes, and rows of 7 or 8 are too
short for a vector unit. In a compiled program that costs nothing.

Here, in `primitives`, `derivatives` and `invariant`, and of this package else only in
`determinism`, JAX's interface for new primitives is used (`jax.extend.core`,
`jax.interpreters`), which may change: checked with jax 0.10.2 and 0.12.0.1, and by
tests/operation/test_primitives.py.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jaxtyping import Array

from .gpu import choice

Shape = tuple[int, ...]
Compute = Callable[..., Sequence[Array] | Array]
Shapes = Callable[..., list[tuple[Shape, Any]]]


class Static(NamedTuple):
    """The static arguments of a pass over x."""

    spatial: int  # how many axes, the last, hold the values of one channel
    arithmetic: Any  # an `arithmetic.Arithmetic`
    has_channels: bool = True  # or whether all values of an example are one channel
    activation: Any = None  # without arrays of its own
    dtype: Any = None  # of what `activated` returns, and of its cotangent
    row: Any = None  # a `rows.Row`

    def flat(self, shape: Shape) -> Shape:
        """Returns `(*mapped, channels, values)`, the shape to calculate in."""
        axis = len(shape) - self.spatial
        channels = () if self.has_channels else (1,)
        return (*shape[:axis], *channels, math.prod(shape[axis:]))


def new_primitive(
    name: str,
    compute: Compute,
    shapes: Shapes,
    full: Sequence[int],
    *,
    takes: Sequence[str] = (),
    on_cpu: Compute | None = None,
    invariant: Compute | None = None,
    kernel: Callable[..., Compute | None] | None = None,
) -> Primitive:
    """Returns a primitive that computes `compute(*arrays, ...)`; it has a parameter `static`.

    **Arguments:**

    - `compute`: given flattened arrays; `on_cpu` instead of it on a CPU, where there is one,
        and `invariant` on all platforms where `static.arithmetic` is device-invariant.
    - `shapes`: gives shape and dtype of each result, for arrays that are not flattened.
    - `full`: the arrays that an ensemble needs in full, where size 1 will do for the others.
        All arrays have the same number of axes; a mapped one is put in front of them, and of
        the parameter `shape`.
    - `takes`: the fields of `static` that `compute` is given by keyword, beside the other
        parameters.
    - `kernel`: on a CUDA device, `kernel(implementation, partitioned, *arrays, ...)`, of
        flattened arrays without their values, returns what to compute instead, or `None`.
    """
    primitive = Primitive(f"eqx_norm_{name}")
    primitive.multiple_results = True

    def lowered(function: Compute, context: Any, *arrays: Any, **parameters: Any) -> Any:
        flat = flattened(function, takes, [aval.shape for aval in context.avals_out])
        return mlir.lower_fun(flat, multiple_results=True)(context, *arrays, **parameters)

    def lower(
        function: Compute, context: Any, *arrays: Any, static: Static, **rest: Any
    ) -> Any:
        function = static.arithmetic.chosen(function, invariant)
        _refuse_kernels(static.arithmetic.implementation, kernel is not None)
        return lowered(function, context, *arrays, static=static, **rest)

    def lower_for_cuda(context: Any, *arrays: Any, static: Static, **rest: Any) -> Any:
        implementation = static.arithmetic.implementation
        # `jax.export` refuses kernels, unless it is told to trust them.
        if implementation == "auto" and context.module_context.lowering_parameters.for_export:
            implementation = "xla"
        chosen = kernel and kernel(
            implementation,
            _is_partitioned(context),
            *(jax.ShapeDtypeStruct(static.flat(a.shape), a.dtype) for a in context.avals_in),
            **_flat_parameters(static, takes, rest),
        )
        function = chosen or static.arithmetic.chosen(compute, invariant)
        with choice.quiet():
            return lowered(function, context, *arrays, static=static, **rest)

    mlir.register_lowering(primitive, functools.partial(lower, compute))
    mlir.register_lowering(primitive, functools.partial(lower, on_cpu or compute), "cpu")
    mlir.register_lowering(primitive, lower_for_cuda, "cuda")

    @functools.lru_cache
    def compiled(**parameters: Any) -> Callable[..., Any]:
        return jax.jit(functools.partial(primitive.bind, **parameters))

    @primitive.def_impl
    def _(*arrays: Array, **parameters: Any) -> Any:
        # Under `jax.disable_jit` it would be this very rule again that is called.
        with jax.disable_jit(False):
            return compiled(**parameters)(*arrays)

    @primitive.def_abstract_eval
    def _(*arrays: Any, **parameters: Any) -> list[Any]:
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
        if parameters.get("shape") is not None:
            parameters["shape"] = (size, *parameters["shape"])
        results = primitive.bind(*arrays, **parameters)
        return results, [0] * len(results)

    batching.primitive_batchers[primitive] = batch
    return primitive


def flattened(compute: Compute, takes: Sequence[str], shapes: Sequence[Shape]) -> Compute:
    """Returns `compute` for arrays as the caller has them, with results of `shapes`."""

    def call(*arrays: Array, static: Static, **parameters: Any) -> list[Array]:
        flat = [array.reshape(static.flat(array.shape)) for array in arrays]
        results = compute(*flat, **_flat_parameters(static, takes, parameters))
        results = [results] if isinstance(results, jax.Array) else results
        return [r.reshape(shape) for r, shape in zip(results, shapes, strict=True)]

    return call


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


def like(array: Array, shape: Shape, dtype: Any) -> Any:
    """Returns an abstract array of `shape` and `dtype`, varying over a mesh as `array` does."""
    aval: Any = jax.typeof(array)
    sharding = _sharding([aval], shape)
    return aval.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)


def _flat_parameters(
    static: Static, takes: Sequence[str], parameters: dict[str, Any]
) -> dict[str, Any]:
    taken = {name: getattr(static, name) for name in takes}
    shape = parameters.get("shape")
    flat = {} if shape is None else {"shape": static.flat(shape)}
    return {**parameters, **taken, **flat}


def _varying(aval: Any) -> frozenset[Any]:
    return aval.manual_axis_type.varying


def _sharding(arrays: Sequence[Any], shape: Shape) -> Any:
    """Returns where a result is, on a mesh with explicit axes: where an operand of its shape
    is; sums are nowhere in particular."""
    alike = [array.sharding for array in arrays if array.shape == shape]
    unsharded = jax.sharding.PartitionSpec(*[None] * len(shape))
    return alike[0] if alike else arrays[0].sharding.update(spec=unsharded)


def _refuse_kernels(implementation: str, has_kernel: bool) -> None:
    if has_kernel and implementation not in ("auto", "xla"):
        raise ValueError(
            f"implementation={implementation!r} is for CUDA devices, and this program is "
            "compiled for another. implementation='auto' takes the kernel where it serves and "
            "XLA elsewhere."
        )


def _is_partitioned(context: Any) -> bool:
    """Returns whether XLA will split the program over devices: not so on one device, nor
    inside `shard_map`."""
    axes = context.module_context.axis_context
    if hasattr(axes, "manual_axes"):
        return frozenset(axes.manual_axes) != frozenset(axes.mesh.axis_names)
    return (getattr(axes, "num_devices", None) or 1) > 1
