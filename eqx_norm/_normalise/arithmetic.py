"""Defines how a batch is summed and how vectors are multiplied: an `Arithmetic`.

The layers' `implementation` names it, and every pass over x takes it as a static argument.
`Arithmetic` itself sums as each platform does it best; `DeviceInvariant` sums in an order that
no number of devices changes.
"""

import dataclasses
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar, Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array

from eqx_norm.strategies import Moments

from . import collectives, invariant, one_loop, reference
from .collectives import AxisName, split_names
from .reference import Activation

Implementation = Literal["auto", "xla", "pallas_triton", "pallas_mosaic", "plain"]
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
    # Whether sums have an order of their own: of each example alone, then over examples.
    by_example: ClassVar[bool] = False
    # Whether passes are JAX's own operations, and differentiated as such.
    is_plain: ClassVar[bool] = False

    # Returns a function of vectors, as it is to be calculated.
    rounded: ClassVar[Callable[..., Any]] = staticmethod(lambda f: f)
    # Returns `a * b`, whose derivatives are products of this kind, too.
    product: ClassVar[Callable[..., Array]] = staticmethod(operator.mul)
    # Returns `1 / sqrt(x)`.
    rsqrt: ClassVar[Callable[..., Array]] = staticmethod(reference.rsqrt)
    # Returns whether moments are finite.
    finite: ClassVar[Callable[[Moments], Array]] = staticmethod(one_loop.finite)
    # Returns what is to be remembered, as it is to be computed.
    remembered: ClassVar[Callable[[Any], Any]] = staticmethod(one_loop.in_one_loop)

    def merged(
        self, moments: Moments, vmapped: Sequence[Hashable], mesh: Sequence[Hashable]
    ) -> Moments:
        """Returns the moments over all named axes, of those that a pass has found."""
        del vmapped  # their values have been gathered
        for name in mesh:
            vectors = jax.tree.leaves(moments)
            count, mean, m2, mean_rest = collectives.merged(vectors, name, _pooled)
            moments = Moments(count, mean, m2, mean_rest)
        return moments

    def from_first(self, vectors: Sequence[Array]) -> Sequence[Array]:
        """Returns the vectors, as every device is to use them for a tangent of its x."""
        return vectors

    def check_activation(self, activation: Activation) -> None:
        """Raises `ValueError` if it cannot take one whose gradients JAX sums."""


@dataclasses.dataclass(frozen=True)
class Plain(Arithmetic):
    """Computes the same formulas in JAX's own primitives, for whoever knows no others."""

    implementation: str = "plain"
    is_plain = True

    # Some transformations, `jet` among them, do not take a `custom_jvp`. The derivative of this
    # stays in range for longer than that of `lax.rsqrt`.
    rsqrt = staticmethod(lambda x: 1 / jnp.sqrt(x))
    finite = staticmethod(operator.attrgetter("finite"))
    remembered = staticmethod(lambda memory: memory)


@dataclasses.dataclass(frozen=True)
class DeviceInvariant(Arithmetic):
    """Sums and rounds in an order that no number of devices changes: see `invariant`."""

    implementation: str = "xla"  # no kernel keeps to that order
    mesh_axes: tuple[Hashable, ...] = ()  # the major first
    by_example = True

    rounded = staticmethod(invariant.rounded)
    product = staticmethod(invariant.product)
    rsqrt = staticmethod(invariant.rsqrt)

    def merged(
        self, moments: Moments, vmapped: Sequence[Hashable], mesh: Sequence[Hashable]
    ) -> Moments:
        """Returns the moments, merged of those of each example by a tree."""
        vectors = [collectives.gather(v[None], vmapped) for v in jax.tree.leaves(moments)]
        count, mean, m2, mean_rest = invariant.merged(vectors, mesh)
        return Moments(count, mean, m2, mean_rest)

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
    if implementation == "plain":
        return Plain()
    if implementation != "device_invariant":
        return Arithmetic(implementation)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        raise ValueError(
            f"implementation={implementation!r} is for real input, and x has dtype {dtype}. "
            "implementation='auto' takes it."
        )
    return DeviceInvariant(mesh_axes=split_names(axis_name)[1])


def _pooled(vectors: Sequence[Array]) -> Sequence[Array]:
    count, mean, m2, mean_rest = vectors
    return jax.tree.leaves(Moments(count, mean, m2, mean_rest).pooled())
