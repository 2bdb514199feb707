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
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from jax import Array

from . import names

AXIS = "batch"  # the mapped axis of layers that take one example
Affine = tuple[Any, Any]  # weight and bias, or `None`
# (weight and bias, memory, x) to y and the memory after it.
Apply = Callable[[Affine, Any, Any], tuple[Array, Any]]


class Layer(NamedTuple):
    """Holds a layer as functions of plain arrays: parameters and memory go in and out.

    Outputs have the dtype that the layer gives them: Equinox's batch norm gives float32 for
    bfloat16.
    """

    memory: tuple[Array, ...]  # before the first batch
    train: Apply
    evaluate: Apply
    # Memory to running mean, running variance, and whatever else is remembered.
    statistics: Callable[[Any], tuple[Array, ...]] = lambda memory: ()


def batch_norm(
    name: str,
    channels: int,
    *,
    momentum: float,
    eps: float,
    channel_axis: int = 1,
    affine: bool = True,
    **of_ours: Any,
) -> Layer:
    """Returns the batch norm of that name, whose `x` is `[N, channels, *spatial]`.

    `momentum` is the share of the running statistics that a batch leaves. With
    `channel_axis=-1`, which is Flax's default and nobody else's, `x` is `[N, *spatial,
    channels]`. Further arguments are those of `eqx_norm.BatchNorm`.
    """
    settings = {"momentum": momentum, "eps": eps, **of_ours}
    if names.package(name) == "flax":
        settings["axis"] = channel_axis
    return _module(name).batch_norm(name, channels, affine, **settings)


def layer_norm(name: str, shape: tuple[int, ...], *, eps: float, **of_ours: Any) -> Layer:
    """Returns the layer norm of that name, whose `x` is `[N, *shape]`; it has no memory.

    Its weight and bias may be `None`, and are of `shape` otherwise. Further arguments are
    those of `eqx_norm.LayerNorm`.
    """
    return _module(name).layer_norm(name, shape, eps, **of_ours)


def _module(name: str) -> Any:
    modules = {"eqx_norm": "ours", "equinox": "of_equinox", "flax": "of_flax"}
    return importlib.import_module(f".{modules[names.package(name)]}", __package__)


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
