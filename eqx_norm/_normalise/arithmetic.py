"""How a batch is summed and how vectors are multiplied, as one object: an `Arithmetic`.

The layers' `implementation` names it, and every pass over x takes it as a static argument.
`Arithmetic` itself sums as each platform does it best; `DeviceInvariant` sums in an order that
no number of devices changes.
"""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from eqx_norm.strategies import Moments

from . import invariant, reference
from .new_primitive import Compute, Static, bind
from .primitives import STATISTICS
from .reference import Activation

AxisName = Hashable | tuple[Hashable, ...]
Implementation = Literal["auto", "xla", "pallas_triton", "pallas_mosaic"]
# Over a batch there is one more.
BatchImplementation = Literal[Implementation, "device_invariant"]


def check(implementation: str, available: Any) -> None:
    """Raises `ValueError` unless it is one of those that are `available`, a `Literal`."""
    available = get_args(available)
    if implementation not in available:
        raise ValueError(
            f"implementation={implementation!r} is not available. Available are "
            f"{', '.join(map(repr, available))}; 'auto' takes the fastest that serves."
        )


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """Sums as each platform does it best, with kernels as `implementation` says."""

    implementation: str = "auto"

    def statistics(
        self, x: Array, mask: Array | None, axis_name: AxisName, static: Static
    ) -> Moments:
        """Returns the moments of each channel over one example's values and the named axes."""
        x, mask = x[None], None if mask is None else mask[None]
        vmapped, mesh = _axes(axis_name)
        # Gathered over a mapped axis, an array is just not mapped any more: nothing is moved.
        for name in vmapped:
            x = _gather(x, name, tiled=True)
            mask = None if mask is None else _gather(mask, name, tiled=True)
        count, mean, m2, mean_rest = bind(STATISTICS, x, mask, static=static)
        moments = Moments(count, mean, m2, mean_rest)
        # Of other devices only the vectors are fetched, at once, and merged in their order.
        for name in mesh:
            shards = _gather(jnp.stack(jax.tree.leaves(moments)), name)
            moments = functools.reduce(Moments.merge, itertools.starmap(Moments, shards))
        return moments

    def chosen(self, compute: Compute, invariant: Compute | None) -> Compute:
        """Returns which of the two a pass computes."""
        del invariant
        return compute

    def rounded(self, f: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `f`, which calculates vectors of others, as it is to be calculated."""
        return f

    def product(self, a: Any, b: Any) -> Array:
        """Returns `a * b`, whose derivatives are products of this kind, too."""
        return operator.mul(a, b)

    def rsqrt(self, x: Array) -> Array:
        """Returns `1 / sqrt(x)`."""
        return reference.rsqrt(x)

    def from_first(self, vectors: Sequence[Array]) -> Sequence[Array]:
        """Returns the vectors, as every device is to use them for a tangent of its x."""
        return vectors

    def check_activation(self, activation: Activation) -> None:
        """Raises `ValueError` if it cannot take one whose gradients JAX sums."""


@dataclasses.dataclass(frozen=True)
class DeviceInvariant(Arithmetic):
    """Sums and rounds in an order that no number of devices changes: see `invariant`."""

    implementation: str = "xla"  # no kernel keeps to that order
    mesh_axes: tuple[Hashable, ...] = ()  # the major first

    def statistics(
        self, x: Array, mask: Array | None, axis_name: AxisName, static: Static
    ) -> Moments:
        """Returns the moments, merged of those of each example by a tree."""
        x, mask = x[None], None if mask is None else mask[None]
        vectors = [v[None] for v in bind(STATISTICS, x, mask, static=static)]
        for name in _axes(axis_name)[0]:
            vectors = [_gather(vector, name, tiled=True) for vector in vectors]
        count, mean, m2, mean_rest = vectors
        examples = Moments(count[:, :1], mean, m2, mean_rest)
        merged = invariant.merged(examples, self.mesh_axes, _gather)
        count = jnp.broadcast_to(merged.count, merged.mean.shape)
        return dataclasses.replace(merged, count=count)

    def chosen(self, compute: Compute, invariant: Compute | None) -> Compute:
        """Returns the one with an order of its own, where there is one."""
        return invariant or compute

    def rounded(self, f: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `f` with each operation rounded by itself."""
        return invariant.rounded(f)

    def product(self, a: Any, b: Any) -> Array:
        """Returns a product that never becomes half of a fused multiply-add."""
        return invariant.product(a, b)

    def rsqrt(self, x: Array) -> Array:
        """Returns a root and a quotient, each rounded by itself."""
        return invariant.rsqrt(x)

    def from_first(self, vectors: Sequence[Array]) -> Sequence[Array]:
        """Returns the first device's vectors: transposed, sums are collected there."""
        return invariant.from_first(vectors, self.mesh_axes)

    def check_activation(self, activation: Activation) -> None:
        """Raises `ValueError`: an order of JAX's own is not one of these."""
        raise ValueError(
            f"activation={activation} has arrays of its own, or is not seen to be elementwise: "
            "its gradients are sums that JAX orders, and not "
            "implementation='device_invariant'. Apply it after the layer."
        )


def arithmetic(
    implementation: BatchImplementation, axis_name: AxisName, dtype: Any
) -> Arithmetic:
    """Returns the arithmetic by its name, for x of `dtype` and the axes to sum over."""
    if implementation != "device_invariant":
        return Arithmetic(implementation)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        raise ValueError(
            f"implementation={implementation!r} is for real input, and x has dtype {dtype}. "
            "implementation='auto' takes it."
        )
    return DeviceInvariant(mesh_axes=_axes(axis_name)[1])


def _axes(axis_name: AxisName) -> tuple[tuple[Hashable, ...], tuple[Hashable, ...]]:
    """Returns the names of mapped axes, and those of axes of a mesh, in their order."""
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    manual = jax.sharding.get_abstract_mesh().manual_axes
    vmapped = tuple(name for name in names if name not in manual)
    return vmapped, tuple(name for name in names if name in manual)


def _gather(array: Array, name: Hashable, *, tiled: bool = False) -> Array:
    # One name at a time: all_gather takes no tuple of vmapped names.
    try:
        return lax.all_gather(array, name, tiled=tiled)
    except (AssertionError, ValueError) as error:
        # Seen with jax 0.10.2 and 0.12.0.1, where any collective over a vmapped axis fails.
        if jax.sharding.get_abstract_mesh().manual_axes:
            raise ValueError(
                f"JAX refuses collectives over the vmapped axis {name!r} inside a shard_map "
                "that checks varying manual axes. Write "
                "jax.shard_map(..., check_vma=False) around this layer."
            ) from error
        raise
