"""Where a kernel stands in for a pass over x: on CUDA, chosen when a program is lowered.

By then shapes are known with all that `vmap` has put in front of them, and so is whether XLA
will partition the program: a kernel is one custom call, which it cannot split, so that
operands which `jit` has sharded would be gathered first. Inside `shard_map` there is nothing
left to partition.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from . import reference

Pass = Callable[..., Sequence[Array]]

PARTITIONED = (
    "XLA partitions this program over several devices, and would gather x to run a kernel. "
    "Write jax.shard_map around the training step, with a mesh axis in axis_name"
)


def of_statistics(
    implementation: str, partitioned: bool, x: Any, mask: Any = None
) -> Pass | None:
    """The kernel to run, or `None` for XLA.

    **Raises:** `ValueError` where a kernel was asked for by name that cannot serve.
    """
    if not _wanted(implementation, partitioned, x, mask):
        return None
    from . import pallas_triton

    return pallas_triton.statistics


def of_sums(
    implementation: str,
    partitioned: bool,
    g: Any,
    x: Any,
    mean: Any,
    rest: Any,
    mask: Any = None,
    *,
    shape: tuple[int, ...],
) -> Pass | None:
    inner = (mean, mean, x, mean, rest, *(() if mask is None else (mask,)))
    pulled = of_pulled(implementation, partitioned, g, *inner, activation=None, shape=shape)
    if pulled is None:
        return None

    def sums(g: Array, x: Array, mean: Array, *more: Array, shape: Any) -> Sequence[Array]:
        return pulled(g, mean, mean, x, mean, *more, activation=None, shape=shape)[:2]

    return sums


def of_pulled(
    implementation: str,
    partitioned: bool,
    g: Any,
    a: Any,
    b: Any,
    x: Any,
    mean: Any,
    rest: Any,
    mask: Any = None,
    *,
    activation: Any,
    shape: tuple[int, ...],
) -> Pass | None:
    by_channel = tuple(1 if i in (x.ndim - 3, x.ndim - 1) else n for i, n in enumerate(x.shape))
    by_example = (*x.shape[:-1], 1)
    # Of both, the vectors must be as large: a bias that an ensemble shares is not.
    if shape not in (by_channel, by_example) or {mean.shape, rest.shape} != {shape}:
        return None
    # A layer norm's examples are an ensemble, with a batch of one each.
    alone = shape != by_channel
    given, given_mask = (_alone(v) if alone else v for v in (x, mask))
    if not _wanted(implementation, partitioned, given, given_mask, activation):
        return None
    return functools.partial(_pulled, alone)


def _pulled(
    alone: bool, g: Array, *inner: Array, activation: Any, shape: tuple[int, ...]
) -> Sequence[Array]:
    from . import pallas_triton

    arrays = [jnp.expand_dims(v, -3) for v in (g, *inner)] if alone else (g, *inner)
    a, b = (jnp.broadcast_to(v, arrays[4].shape) for v in arrays[1:3])
    sums = pallas_triton.pulled_sums(activation, arrays[0], a, b, *arrays[3:])
    if activation is not None:
        g = reference.slope(activation, g, *inner)
    return [*(s.reshape(shape) for s in sums), g]


def _alone(array: Any) -> Any:
    if array is None:
        return None
    return jax.ShapeDtypeStruct((*array.shape[:-2], 1, *array.shape[-2:]), array.dtype)


def _wanted(
    implementation: str, partitioned: bool, x: Any, mask: Any, activation: Any = None
) -> bool:
    if implementation == "xla":
        return False
    why_not = PARTITIONED if partitioned else _why_not(x, mask, activation)
    if implementation != "auto" and why_not is not None:
        raise ValueError(
            f"implementation={implementation!r} cannot serve x of shape {x.shape} and dtype "
            f"{x.dtype} (ensemble, examples, channels, values): {why_not}. "
            "implementation='auto' takes XLA where a kernel cannot serve."
        )
    if why_not is not None:
        return False
    from . import tiling

    return implementation != "auto" or tiling.worthwhile(x)


def _why_not(x: Any, mask: Any, activation: Any) -> str | None:
    try:
        from . import pallas_triton
    except ImportError as error:
        return f"this version of jax has no Pallas for Triton ({error})"
    return pallas_triton.serves(x, mask, activation)
