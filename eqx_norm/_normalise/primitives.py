"""Defines the passes over x, as primitives of JAX.

    statistics(x)                        count, mean, m2, mean_rest      (not differentiated)
    deviations(x; mean)                  0 and 0, whose derivatives are `sums`
    sums(g; x, mean)                     sum(g), sum(g (x - mean))       linear in g
    affine(bias, scale; x, mean)         bias + scale (x - mean)         linear in bias, scale
    activated(bias, scale, x, mean)      activation(affine)
    activation_jvp(g; bias, ...)         activation'(affine) g           linear in g
    activated_jvp(bias', scale', u'; ..) activation_jvp(affine(bias', scale') + u'), linear in
                                         bias', scale' and u'
    activated_vjp(g; bias, ...)          sums(activation_jvp(g)), activation_jvp(g)

`sums` and `affine` are each other's transpose, so are `activated_jvp` and `activated_vjp`, and
`activation_jvp` is its own. So the backward pass of a normalisation, differentiated and
transposed by JAX, is one `activated_vjp` and one `affine`; forward mode and all higher orders
remain; and of the size of x nothing is kept but x. In jax.numpy alone the transpose would have
four sums where two suffice, and would keep x - mean and what the activation needs.

Operands are positional: `bias, scale, x, mean, mean_rest` and, if there is one, `mask`. All
have as many axes as x, of size 1 where they do not differ. `deviations` and `activated` also
take `wide`, which is x in the dtype to calculate in. They do not use its value: its tangent is
what their derivatives take for that of x, so that the cotangents which x gets from both are
added before they are rounded to half precision.

A pass takes x as the caller has it, `(*mapped, channels, *spatial)`, so that x is kept once for
the backward pass, in that form. When a program is lowered, for each platform in its own way,
arrays are flattened to `(*mapped, channels, values)`, because loops follow an array's axes, and
rows of 7 or 8 are too short for a vector unit. In a compiled program that costs nothing.

Here, in `derivatives` and in `invariant`, and of this package else only in `determinism`, JAX's
interface for new primitives is used (`jax.extend.core`, `jax.interpreters`), which may change:
checked with jax 0.10.2 and 0.12.0.1, and by tests/operation/test_primitives.py.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jaxtyping import Array

from . import invariant, on_cpu, reference
from .arithmetic import Arithmetic
from .collectives import varying
from .gpu import choice

Shape = tuple[int, ...]
Compute = Callable[..., Sequence[Array] | Array]
Shapes = Callable[..., list[tuple[Shape, Any]]]
# What a primitive computes, as JAX's own operations.
_PLAIN: dict[Primitive, Callable[..., list[Array]]] = {}


class Static(NamedTuple):
    """Holds the static arguments of a pass over x."""

    spatial: int  # how many axes, the last, hold the values of one channel
    arithmetic: Arithmetic
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
    partitioned: Compute | None = None,
    kernel: Callable[..., Compute | None] | None = None,
) -> Primitive:
    """Returns a primitive that computes `compute(*arrays, ...)`; it has a parameter `static`.

    **Arguments:**

    - `compute`: given flattened arrays; `on_cpu` instead of it on a CPU, where there is one,
        and `invariant` on all platforms where `static.arithmetic` is device-invariant.
    - `partitioned`: where XLA splits arrays over devices, if not `compute`; never `on_cpu`,
        whose sums cut arrays up in another way.
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

    def plain(*arrays: Array, **parameters: Any) -> list[Array]:
        results = [shape for shape, _ in shapes(*arrays, **parameters)]
        return flattened(compute, takes, results)(*arrays, **parameters)

    _PLAIN[primitive] = plain

    def lowered(
        function: Compute, context: Any, *arrays: Any, static: Static, **rest: Any
    ) -> Any:
        if invariant and static.arithmetic.by_example:
            function = invariant
        flat = flattened(function, takes, [aval.shape for aval in context.avals_out])
        lower = mlir.lower_fun(flat, multiple_results=True)
        with _without_explicit_axes():
            plain = [ShapedArray(a.shape, a.dtype) for a in context.avals_in]
            return lower(context.replace(avals_in=plain), *arrays, static=static, **rest)

    def lower(
        function: Compute, context: Any, *arrays: Any, static: Static, **rest: Any
    ) -> Any:
        implementation = static.arithmetic.implementation
        if kernel and implementation not in ("auto", "xla"):
            raise ValueError(
                f"implementation={implementation!r} is for CUDA devices, and this program is "
                "compiled for another. implementation='auto' takes the kernel where it serves "
                "and XLA elsewhere."
            )
        if _is_partitioned(context):
            function = partitioned or compute
        return lowered(function, context, *arrays, static=static, **rest)

    def lower_for_cuda(context: Any, *arrays: Any, static: Static, **rest: Any) -> Any:
        implementation = static.arithmetic.implementation
        # `jax.export` refuses kernels, unless it is told to trust them.
        if implementation == "auto" and context.module_context.lowering_parameters.for_export:
            implementation = "xla"
        is_partitioned = _is_partitioned(context)
        found = kernel and kernel(
            implementation,
            is_partitioned,
            *(jax.ShapeDtypeStruct(static.flat(a.shape), a.dtype) for a in context.avals_in),
            **_flat_parameters(static, takes, rest),
        )
        plain = partitioned if partitioned and is_partitioned else compute
        with choice.quiet():
            return lowered(found or plain, context, *arrays, static=static, **rest)

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
        if _vary_differently(arrays):
            raise TypeError(
                f"{primitive} was given arrays that vary over different axes of a mesh, "
                f"{', '.join(map(str, arrays))}: its derivatives would be wrong. Bind it by "
                "primitives.bind, which aligns them."
            )
        return [_result(arrays, *result) for result in shapes(*arrays, **parameters)]

    def batch(arrays: Any, axes: Any, **parameters: Any) -> tuple[Any, list[int]]:
        size = next(a.shape[i] for a, i in zip(arrays, axes, strict=True) if i is not None)
        arrays = [
            lax.reshape(array, (1, *array.shape))
            if axis is None
            else jnp.moveaxis(array, axis, 0)
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


def flattened(
    compute: Compute, takes: Sequence[str], shapes: Sequence[Shape]
) -> Callable[..., list[Array]]:
    """Returns `compute` for arrays as the caller has them, with results of `shapes`."""

    def call(*arrays: Array, static: Static, **parameters: Any) -> list[Array]:
        flat = [array.reshape(static.flat(array.shape)) for array in arrays]
        results = compute(*flat, **_flat_parameters(static, takes, parameters))
        results = [results] if isinstance(results, jax.Array) else results
        return [r.reshape(shape) for r, shape in zip(results, shapes, strict=True)]

    return call


def bind(primitive: Primitive, *arrays: Array | None, **parameters: Any) -> list[Array]:
    """Returns the primitive's results for the arrays that there are, all of which vary over the
    axes of a mesh over which any does."""
    given = [array for array in arrays if array is not None]
    given = varying(given) if _vary_differently(map(jax.typeof, given)) else given
    if parameters["static"].arithmetic.is_plain:
        return _PLAIN[primitive](*given, **parameters)
    return primitive.bind(*given, **parameters)


def like(array: Array, shape: Shape, dtype: Any) -> Any:
    """Returns an abstract array of `shape` and `dtype`, varying over a mesh as `array` does."""
    return _result([jax.typeof(array)], shape, dtype)


def _flat_parameters(
    static: Static, takes: Sequence[str], parameters: dict[str, Any]
) -> dict[str, Any]:
    taken = {name: getattr(static, name) for name in takes}
    shape = parameters.get("shape")
    flat = {} if shape is None else {"shape": static.flat(shape)}
    return {**parameters, **taken, **flat}


def _vary_differently(arrays: Iterable[Any]) -> bool:
    return len({array.manual_axis_type.varying for array in arrays}) > 1


def _result(arrays: Sequence[Any], shape: Shape, dtype: Any) -> Any:
    """Returns an abstract result. It varies over the mesh as the operands do; on a mesh with
    explicit axes, so is each of its axes which the largest operand has, too, split as there."""
    whole = max(arrays, key=lambda array: array.size)
    axes = range(whole.ndim)
    if len(shape) < whole.ndim:  # statistics: the axis of examples is gone, and those of values
        axes = [*range(len(shape) - 1), len(shape)]
    spec = whole.sharding.spec
    split = [spec[i] if whole.shape[i] == n else None for i, n in zip(axes, shape, strict=True)]
    sharding = whole.sharding.update(spec=jax.sharding.PartitionSpec(*split))
    return arrays[0].update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)


def _without_explicit_axes() -> Any:
    """Returns a context in which arrays have no type of where they are: inside a primitive
    XLA decides."""
    mesh = jax.sharding.get_abstract_mesh()
    auto = dict.fromkeys(mesh.explicit_axes, jax.sharding.AxisType.Auto)
    return jax.sharding.use_abstract_mesh(mesh.update_axis_types(auto))


def _is_partitioned(context: Any) -> bool:
    """Returns whether XLA will split the program over devices: not so on one device, nor
    inside `shard_map`."""
    axes = context.module_context.axis_context
    if hasattr(axes, "manual_axes"):
        return frozenset(axes.manual_axes) != frozenset(axes.mesh.axis_names)
    return (getattr(axes, "num_devices", None) or 1) > 1


# --- What the passes compute, beside the formulas.


def _activated(
    bias: Array, scale: Array, wide: Array, *centre: Array, activation: Any, dtype: Any
) -> Array:
    del wide
    return reference.activated(activation, bias, scale, *centre).astype(dtype)


def _activation_jvp_elsewhere(
    g: Array, bias: Array, scale: Array, x: Array, *rest: Array, activation: Any
) -> Array:
    """Returns `reference.activation_jvp`, but where XLA for a GPU would write out a mask that
    two passes need.

    Where nothing but columns is summed, that costs 2.5 times reading x in bfloat16; as a
    product the derivative of a ReLU is computed again. (Between convolutions the product costs
    more: see experiments/results/compiled_programs.csv.)
    """
    if activation is jax.nn.relu and x.shape[-1] == 1:
        return g * jnp.sign(reference.activated(activation, bias, scale, x, *rest))
    return reference.activation_jvp(g, bias, scale, x, *rest, activation=activation)


def _activated_jvp(
    dbias: Array, dscale: Array, du: Array, *inner: Array, activation: Any, dtype: Any
) -> Array:
    _, _, x, mean, mean_rest, *_ = inner
    tangent = reference.affine(dbias, dscale, x, mean, mean_rest) + du
    return reference.activation_jvp(tangent, *inner, activation=activation).astype(dtype)


def _activated_vjp(
    g: Array,
    bias: Array,
    scale: Array,
    *centre: Array,
    activation: Any,
    shape: Shape,
    total: reference.Total = reference.plain,
    activation_jvp: Callable[..., Array] = reference.activation_jvp,
) -> list[Array]:
    g = activation_jvp(g.astype(bias.dtype), bias, scale, *centre, activation=activation)
    return [*reference.sums(g, *centre, shape=shape, total=total), g]


# --- The passes.


def _vectors(x: Any, *mask: Any, static: Static) -> list[tuple[Shape, Any]]:
    del mask
    *ensemble, _examples, channels, _values = static.flat(x.shape)
    return [((*ensemble, channels), reference.compute_dtype(x.dtype))] * 4


STATISTICS = new_primitive(
    "statistics",
    reference.statistics,
    _vectors,
    full=[0],
    on_cpu=on_cpu.statistics,
    invariant=invariant.rounded(invariant.statistics),
    partitioned=functools.partial(reference.statistics, sharded=True),
    kernel=choice.of_statistics,
)
DEVIATIONS = new_primitive(
    "deviations",
    lambda wide, *_, shape: [jnp.zeros(shape, wide.dtype)] * 2,
    lambda wide, *_, static, shape: [(shape, wide.dtype)] * 2,
    full=[0, 1],
)
SUMS = new_primitive(
    "sums",
    reference.sums,
    lambda g, *_, static, shape: [(shape, g.dtype)] * 2,
    full=[0, 1],
    on_cpu=functools.partial(reference.sums, total=on_cpu.total),
    invariant=invariant.rounded(functools.partial(reference.sums, total=invariant.total)),
)
AFFINE = new_primitive(
    "affine",
    reference.affine,
    lambda bias, scale, x, *_, static: [(x.shape, bias.dtype)],
    full=[2],
    invariant=invariant.of_sums(reference.affine),
)
ACTIVATED = new_primitive(
    "activated",
    _activated,
    lambda bias, scale, wide, x, *_, static: [(x.shape, static.dtype)],
    full=[2, 3],
    takes=["activation", "dtype"],
    invariant=invariant.rounded(_activated),
)
ACTIVATION_JVP = new_primitive(
    "activation_jvp",
    _activation_jvp_elsewhere,
    lambda g, *_, static: [(g.shape, g.dtype)],
    full=[0, 3],
    takes=["activation"],
    on_cpu=reference.activation_jvp,
    invariant=invariant.rounded(reference.activation_jvp),
)
ACTIVATED_JVP = new_primitive(
    "activated_jvp",
    _activated_jvp,
    lambda dbias, dscale, du, *_, static: [(du.shape, static.dtype)],
    full=[2, 5],
    takes=["activation", "dtype"],
    invariant=invariant.of_sums(_activated_jvp),
)
ACTIVATED_VJP = new_primitive(
    "activated_vjp",
    functools.partial(_activated_vjp, activation_jvp=_activation_jvp_elsewhere),
    lambda g, bias, *_, static, shape: [*[(shape, bias.dtype)] * 2, (g.shape, bias.dtype)],
    full=[0, 3],
    takes=["activation"],
    on_cpu=functools.partial(_activated_vjp, total=on_cpu.total),
    invariant=invariant.rounded(functools.partial(_activated_vjp, total=invariant.total)),
    kernel=choice.of_activated_vjp,
)


# Returns the vectors that it is given, as if they were others. On a GPU, XLA would otherwise
# keep what the forward pass has computed of them and x, rather than compute it again. A CPU
# computes it again anyway. (x itself is not passed through: it would be kept twice.)
RECOMPUTE_BARRIER = Primitive("eqx_norm_recompute_barrier")
RECOMPUTE_BARRIER.multiple_results = True
RECOMPUTE_BARRIER.def_impl(lambda *arrays: arrays)
RECOMPUTE_BARRIER.def_abstract_eval(lambda *arrays: arrays)
mlir.register_lowering(
    RECOMPUTE_BARRIER, mlir.lower_fun(lambda *a: lax.optimization_barrier(a), True)
)
mlir.register_lowering(RECOMPUTE_BARRIER, lambda context, *arrays: arrays, platform="cpu")
batching.primitive_batchers[RECOMPUTE_BARRIER] = lambda arrays, axes: (
    RECOMPUTE_BARRIER.bind(*arrays),
    axes,
)
