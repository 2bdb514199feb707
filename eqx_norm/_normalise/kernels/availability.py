"""Decides whether a kernel serves an x with `implementation="pallas"`; an error says why not.

XLA does not partition kernels: it would first gather operands that `jit` has sharded. Inside
`shard_map` operands are local already. The modules of kernels, and with them Pallas, are
imported only for a kernel: the import takes several times as long as the rest of the package.
"""

import importlib
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, Literal, get_args

import jax
from jaxtyping import Array

from eqx_norm._jax.lowering import Target

Implementation = Literal["auto", "xla", "pallas"]
ArrayOrType = Array | jax.ShapeDtypeStruct  # an array of which only shape and dtype are read
Ref = Any  # a reference of Pallas to an array, or to a part of one, in a kernel
# The oldest jax with which the kernels for CUDA devices were compiled.
_JAX_OF_CUDA = (0, 11, 2)
_NAMES = {"cuda": "CUDA devices", "tpu": "TPUs"}


def check_implementation(implementation: str) -> None:
    """Raises `ValueError` unless `implementation` is available."""
    available = get_args(Implementation)
    if implementation not in available:
        raise ValueError(
            f"implementation={implementation!r} is not available. Available are "
            f"{', '.join(map(repr, available))}; 'auto' is 'xla' for now."
        )


def platform(target: Target, x: ArrayOrType, dtypes: Mapping[str, Sequence[str]]) -> str:
    """Returns the platform of a program; raises `ValueError` if no kernel serves x there.

    **Arguments:** `dtypes`: the dtypes that a kernel takes, for each platform that has one.
    """
    name = target.platforms[0]
    if len(target.platforms) > 1 or name not in dtypes:
        served = " and ".join(_NAMES[name] for name in dtypes)
        program = ", ".join(target.platforms)
        raise refusal(x, f"it is for {served}, and this program is for {program}")
    if target.is_partitioned:
        raise refusal(
            x,
            "XLA partitions this program over several devices, and would gather x for a "
            "kernel. Write jax.shard_map around the training step, with its mesh axis in "
            "the axis_name of a BatchNorm",
        )
    if x.dtype.name not in dtypes[name]:
        taken = ", ".join(dtypes[name])
        raise refusal(x, f"x is {x.dtype}, and the kernel for {_NAMES[name]} takes {taken}")
    if name == "cuda" and jax.__version_info__ < _JAX_OF_CUDA:
        needs = "the kernels for CUDA devices need jax {}.{}.{} or later".format(*_JAX_OF_CUDA)
        raise refusal(x, f"{needs}, and this is jax {jax.__version__}")
    return name


def kernels(module: str) -> ModuleType:
    """Imports and returns a module of kernels."""
    return importlib.import_module(f".{module}", __package__)


def refusal(
    x: ArrayOrType, why_not: str, axes: str = "mapped axes, channels, values"
) -> ValueError:
    """Returns the error that no kernel serves x; `axes` says what the axes of x are."""
    return ValueError(
        f"implementation='pallas' cannot serve x of shape {x.shape} and dtype {x.dtype} "
        f"({axes}): {why_not}. Use implementation='auto'."
    )
