"""Makes the layers that are compared: this package's, Equinox's, Flax's and PyTorch's.

Each is used as its users would use it, under one name (`names`) wherever it appears. Those in
JAX have one form, `Layer`: functions of plain arrays, so that calling any of them costs the
same Python. PyTorch's run eagerly, and have a module of their own (`of_torch`).

    made = peers.batch_norm("Flax linen", channels=64, momentum=0.9, eps=1e-5)
    y, memory = made.train((weight, bias), made.memory, x)

Flax and PyTorch are imported when a layer of theirs is made.
"""

import dataclasses
import importlib
import importlib.util
from collections.abc import Iterable
from typing import Any

from . import names
from .layer import AXIS as AXIS
from .layer import Affine as Affine
from .layer import Apply as Apply
from .layer import BatchNorm as BatchNorm
from .layer import Layer as Layer
from .layer import LayerNorm as LayerNorm

_MODULES = {"eqx_norm": "ours", "equinox": "of_equinox", "flax": "of_flax"}


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
    return _module(name).batch_norm(name, settings)


def layer_norm(name: str, shape: tuple[int, ...], *, eps: float) -> Layer:
    """Returns the layer norm of that name, whose `x` is `[N, *shape]`; it has no memory.

    Its weight and bias may be `None`, and are of `shape` otherwise.
    """
    return _module(name).layer_norm(name, LayerNorm(shape, eps))


def _module(name: str) -> Any:
    package = names.package(name)
    if package not in _MODULES:
        raise ValueError(f"{name!r} is no layer in JAX; for PyTorch's, see peers.of_torch.")
    return importlib.import_module(f".{_MODULES[package]}", __package__)


def present(wanted: Iterable[str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Returns those of the peers that are installed here, and why the others are left out."""
    packages = {name: names.package(name) for name in wanted}
    left_out = {
        name: f"{package} is not installed (make experiments has it)"
        for name, package in packages.items()
        if importlib.util.find_spec(package) is None
    }
    return tuple(name for name in packages if name not in left_out), left_out


def present_layers(job: Any) -> tuple[Any, dict[str, str]]:
    """Returns the job with those of its `layers` that are installed, and why not the others."""
    layers, left_out = present(job.layers)
    return dataclasses.replace(job, layers=layers), left_out
