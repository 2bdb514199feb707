"""Decides where a kernel stands in for a pass over x: on CUDA, when a program is lowered.

By then shapes are known with all that `vmap` has put in front of them, and so is whether XLA
will partition the program: a kernel is one custom call, which it cannot split, so that
operands which `jit` has sharded would be gathered first. Inside `shard_map` there is nothing
left to partition.

A kernel's operands are in memory, and XLA fuses nothing into it. So kernels stand only where a
pass reads what the user gave: x, and the gradient of the layer's output.

The modules of the kernels, and Pallas with them, are imported where one is chosen: they take
several times as long as the rest of the package, and most machines have no use for them.
"""

import contextlib
import importlib
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jaxtyping import Array

from eqx_norm._normalise import reference

from . import tiling

Pass = Callable[..., Sequence[Array]]

# In the order of preference: the second is to replace the first, which jax will remove.
_BACKENDS = {"pallas_triton": ".triton", "pallas_mosaic": ".mosaic"}

PARTITIONED = (
    "XLA partitions this program over several devices, and would gather x to run a kernel. "
    "Write jax.shard_map around the training step, with its mesh axis in axis_name"
)


def of_statistics(
    implementation: str, partitioned: bool, x: Any, mask: Any = None
) -> Pass | None:
    """Returns the kernel for `reference.statistics`, or `None` for XLA.

    **Raises:** `ValueError` where a kernel was asked for by name that cannot serve.
    """
    backend = _chosen(implementation, partitioned, x, mask)
    return backend and backend.statistics


def of_activated_vjp(
    implementation: str, partitioned: bool, *arrays: Any, activation: Any, shape: Any
) -> Pass | None:
    """Returns the kernel for the sums of `ACTIVATED_VJP`, or `None`; the rest is XLA's."""
    _, _, _, x, _, _, *mask = arrays
    if shape != tuple(1 if i in (x.ndim - 3, x.ndim - 1) else n for i, n in enumerate(x.shape)):
        return None  # an ensemble that shares what is summed
    backend = _chosen(implementation, partitioned, x, *mask, activation=activation)

    def activated_vjp(
        g: Array, bias: Array, *inner: Array, activation: Any, shape: Any
    ) -> list[Array]:
        del shape
        sums = backend.vjp_sums(activation, g, bias, *inner)
        g = g.astype(bias.dtype)
        return [*sums, reference.activation_jvp(g, bias, *inner, activation=activation)]

    return backend and activated_vjp


def of_rows(
    implementation: str, partitioned: bool, x: Any, *affine: Any, row: Any
) -> Pass | None:
    """Returns the kernel for `rows.ROWS`, or `None` for the passes that it is composed of."""
    if not _serves_rows(implementation, partitioned, x, affine, row, tiling.FORWARD):
        return None
    from . import triton_rows

    return triton_rows.rows


def of_rows_vjp(
    implementation: str,
    partitioned: bool,
    g: Any,
    x: Any,
    *others: Any,
    row: Any,
    learns: bool,
    shape: tuple[int, ...] | None,
) -> Pass | None:
    """Returns the kernel for `rows.ROWS_VJP`, or `None`."""
    if g.shape != x.shape or math.prod((shape or ())[:-1]) != 1:
        return None
    held = tiling.LEARNING if learns else tiling.BACKWARD
    if not _serves_rows(implementation, partitioned, x, others[:-3], row, held):
        return None
    from . import triton_rows

    return triton_rows.rows_vjp


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences the warning, while kernels are lowered, that jax deprecates Triton's backend.

    To be removed with that backend, for which Mosaic is to follow.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "The Pallas Triton backend is deprecated", DeprecationWarning
        )
        yield


def _serves_rows(
    implementation: str, partitioned: bool, x: Any, affine: Sequence[Any], row: Any, held: int
) -> bool:
    """Returns whether a kernel is to hold a row, with `held` numbers for each value.

    There is no error here: the passes that it is composed of say what cannot be served.
    """
    count, values = math.prod(x.shape[:-1]), x.shape[-1]
    rows = jax.ShapeDtypeStruct((count, 1, 1, values), x.dtype)
    return (
        # A single row is for many programs.
        count > 1
        and not partitioned
        and implementation != "pallas_mosaic"
        and tiling.holds_rows(values, held)
        # Weight and bias are the same for all rows.
        and all(math.prod(array.shape[:-1]) == 1 for array in affine)
        and _chosen(implementation, partitioned, rows, activation=row.activation) is not None
    )


def _chosen(
    implementation: str, partitioned: bool, x: Any, mask: Any = None, activation: Any = None
) -> Any:
    """Returns the backend whose kernels to take, or `None`."""
    if implementation == "xla" or (implementation == "auto" and not tiling.worthwhile(x)):
        return None
    why_not = PARTITIONED
    for name in _BACKENDS:
        if implementation in ("auto", name) and not partitioned:
            backend = importlib.import_module(_BACKENDS[name], __package__).BACKEND
            why_not = backend.serves(x, mask, activation)
            if why_not is None:
                return backend
    if implementation != "auto":
        raise ValueError(
            f"implementation={implementation!r} cannot serve x of shape {x.shape} and dtype "
            f"{x.dtype} (ensemble, examples, channels, values): {why_not}. "
            "implementation='auto' takes XLA where a kernel cannot serve."
        )
    return None
