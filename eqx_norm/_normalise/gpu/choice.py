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
    return backend and rest_before_m2(backend.statistics)


def of_pulled(
    implementation: str, partitioned: bool, *arrays: Any, activation: Any, shape: Any
) -> Pass | None:
    """Returns the kernel for the sums of the slope, or `None`; the slope is left to XLA."""
    _, _, _, x, _, _, *mask = arrays
    if shape != tuple(1 if i in (x.ndim - 3, x.ndim - 1) else n for i, n in enumerate(x.shape)):
        return None  # an ensemble that shares what is summed
    backend = _chosen(implementation, partitioned, x, *mask, activation=activation)

    def pulled(g: Array, a: Array, *inner: Array, activation: Any, shape: Any) -> list[Array]:
        del shape
        sums = backend.pulled_sums(activation, g, a, *inner)
        return [*sums, reference.slope(activation, g.astype(a.dtype), a, *inner)]

    return backend and pulled


def of_rows(
    implementation: str, partitioned: bool, x: Any, *affine: Any, how: Any
) -> Pass | None:
    """Returns the kernel for `rows.ROWS`, or `None` for the passes that it is composed of."""
    if not _serves_rows(implementation, partitioned, x, affine, how, tiling.FORWARD):
        return None
    from . import triton_rows

    return rest_before_m2(
        lambda *arrays, how: triton_rows.rows(how.activation, how.eps, *arrays)
    )


def of_pulled_rows(
    implementation: str,
    partitioned: bool,
    g: Any,
    x: Any,
    *others: Any,
    how: Any,
    learns: bool,
    shape: tuple[int, ...],
) -> Pass | None:
    """Returns the kernel for `rows.PULLED_ROWS`, or `None`."""
    if g.shape != x.shape or math.prod(shape[:-1]) != 1:
        return None
    held = tiling.LEARNING if learns else tiling.BACKWARD
    if not _serves_rows(implementation, partitioned, x, others[:-3], how, held):
        return None
    from . import triton_rows

    def pulled(*arrays: Array, how: Any, learns: bool, shape: Any) -> list[Array]:
        del shape
        *others, mean, rest, m2 = arrays  # TO BE FLIPPED, see rest_before_m2
        moments = mean, m2, rest
        return triton_rows.pulled_rows(how.activation, how.eps, learns, *others, *moments)

    return pulled


def rest_before_m2(kernel: Pass) -> Pass:
    """Returns the kernel with results that end in mean, rest, m2, not mean, m2, mean_rest.

    TO BE FLIPPED: the kernels keep moments in the order of `strategies.Moments`. Once the
    operation does, this function goes, and so does the line in `of_pulled_rows`.
    """

    def flipped(*arrays: Array, **parameters: Any) -> list[Array]:
        *others, m2, mean_rest = kernel(*arrays, **parameters)
        return [*others, mean_rest, m2]

    return flipped


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
    implementation: str, partitioned: bool, x: Any, affine: Sequence[Any], how: Any, held: int
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
        and _chosen(implementation, partitioned, rows, activation=how.activation) is not None
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
