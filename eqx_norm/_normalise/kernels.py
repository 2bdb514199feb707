"""Where a kernel stands in for a pass over x: on CUDA, chosen when a program is lowered.

By then shapes are known with all that `vmap` has put in front of them, and so is whether XLA
will partition the program: a kernel is one custom call, which it cannot split, so that
operands which `jit` has sharded would be gathered first. Inside `shard_map` there is nothing
left to partition.

A kernel's operands are in memory, and XLA fuses nothing into it. So kernels stand only where a
pass reads what the user gave: x, and the gradient of the layer's output.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from jaxtyping import Array

from . import pallas_triton, reference, tiling

Pass = Callable[..., Sequence[Array]]

PARTITIONED = (
    "XLA partitions this program over several devices, and would gather x to run a kernel. "
    "Write jax.shard_map around the training step, with its mesh axis in axis_name"
)


def of_statistics(
    implementation: str, partitioned: bool, x: Any, mask: Any = None
) -> Pass | None:
    """The kernel for `reference.statistics`, or `None` for XLA.

    **Raises:** `ValueError` where a kernel was asked for by name that cannot serve.
    """
    if _wanted(implementation, partitioned, x, mask, None):
        return pallas_triton.statistics
    return None


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
    """The same for the sums of the slope; the slope itself is left to XLA, to fuse."""
    del g, a, b, mean, rest
    if shape != tuple(1 if i in (x.ndim - 3, x.ndim - 1) else n for i, n in enumerate(x.shape)):
        return None  # an ensemble that shares what is summed
    if _wanted(implementation, partitioned, x, mask, activation):
        return _pulled
    return None


def quiet() -> contextlib.AbstractContextManager[None]:
    """What is lowered in here does not warn of what the user did not write."""
    return pallas_triton.quiet()


def _pulled(g: Array, a: Array, *inner: Array, activation: Any, shape: Any) -> Sequence[Array]:
    sums = pallas_triton.pulled_sums(activation, g, a, *inner)
    return [*sums, reference.slope(activation, g.astype(a.dtype), a, *inner)]


def _wanted(implementation: str, partitioned: bool, x: Any, mask: Any, activation: Any) -> bool:
    if implementation == "xla":
        return False
    why_not = PARTITIONED if partitioned else pallas_triton.serves(x, mask, activation)
    if implementation != "auto" and why_not is not None:
        raise ValueError(
            f"implementation={implementation!r} cannot serve x of shape {x.shape} and dtype "
            f"{x.dtype} (ensemble, examples, channels, values): {why_not}. "
            "implementation='auto' takes XLA where a kernel cannot serve."
        )
    return why_not is None and (implementation != "auto" or tiling.worthwhile(x))
