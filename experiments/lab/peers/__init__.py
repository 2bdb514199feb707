"""The layers that are compared: this package's, Equinox's, Flax's and PyTorch's.

Each is used as its users would use it, under one name (`names`) wherever it appears. Those in
JAX have one form, `Layer`: functions of plain arrays, so that calling any of them costs the
same Python. PyTorch's run eagerly, and have a module of their own (`of_torch`).

    made = peers.batch_norm("Flax linen", channels=64, momentum=0.9, eps=1e-5)
    y, memory = made.train((weight, bias), made.memory, x)

Flax and PyTorch are imported when a layer of theirs is made.
"""

import importlib.util
from collections.abc import Iterable

from . import names
from .layer import AXIS as AXIS
from .layer import Affine as Affine
from .layer import Apply as Apply
from .layer import BatchNorm as BatchNorm
from .layer import Layer as Layer
from .layer import LayerNorm as LayerNorm


def batch_norm(
    name: str,
    channels: int,
    *,
    momentum: float,
    eps: float,
    channel_axis: int = 1,
    affine: bool = True,
) -> Layer:
    """Returns the batch norm of that name, whose `x` is `[N, channels, *spatial]`.

    `momentum` is the share of the running statistics that a batch leaves. With
    `channel_axis=-1`, which is Flax's default and nobody else's, `x` is `[N, *spatial,
    channels]`.
    """
    settings = BatchNorm(channels, momentum, eps, channel_axis, affine)
    match names.package(name):
        case "eqx_norm":
            from . import ours

            return ours.batch_norm(name, settings)
        case "equinox":
            from . import of_equinox

            return of_equinox.batch_norm(name, settings)
        case "flax":
            from . import of_flax

            return of_flax.batch_norm(name, settings)
    raise ValueError(f"{name!r} is no layer in JAX; for PyTorch's, see peers.of_torch.")


def layer_norm(name: str, shape: tuple[int, ...], *, eps: float) -> Layer:
    """Returns the layer norm of that name, whose `x` is `[N, *shape]`; it has no memory.

    Its weight and bias may be `None`, and are of `shape` otherwise.
    """
    settings = LayerNorm(shape, eps)
    match names.package(name):
        case "eqx_norm":
            from . import ours

            return ours.layer_norm(name, settings)
        case "equinox":
            from . import of_equinox

            return of_equinox.layer_norm(settings)
        case "flax":
            from . import of_flax

            return of_flax.layer_norm(name, settings)
    raise ValueError(f"{name!r} is no layer in JAX; for PyTorch's, see peers.of_torch.")


def present(wanted: Iterable[str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Returns those of the peers that are installed here, and why the others are left out."""
    kept, left_out = [], {}
    for name in wanted:
        if importlib.util.find_spec(names.package(name)) is None:
            left_out[name] = f"{names.package(name)} is not installed (make experiments has it)"
        else:
            kept.append(name)
    return tuple(kept), left_out
