"""The layers in JAX that are timed on a GPU, each in its own words, brought to one form.

Parameters and statistics are float32. The output has the dtype of x: Equinox's batch norm
gives float32 for bfloat16, and is cast, as it has to be in a network. Of Equinox's two modes
"ema" is not here: it fails in bfloat16, and moves as many bytes as "batch"
(results/gpu_compile.csv). Nor is nnx, whose arithmetic is that of linen.
"""

import functools
import importlib.util
import typing
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp

from eqx_norm import BatchNorm, LayerNorm, _normalise

from . import gpu_run_torch
from .accuracy_peers import OURS
from .benchmark_layers import AXIS, EPS, MOMENTUM
from .gpu_programs import Apply
from .gpu_run_job import BATCH_NORM, Problem
from .gpu_run_torch import COMPILED, TORCH

# Every implementation that there is joins by itself.
IMPLEMENTATIONS: tuple[str, ...] = typing.get_args(_normalise.Implementation)
OURS_BY = {name: f"{OURS} {name}" for name in IMPLEMENTATIONS}
AUTO, XLA = OURS_BY["auto"], OURS_BY["xla"]
EQUINOX, FLAX, NO_NORM = "Equinox", "Flax", "no norm"
EVERY = (*OURS_BY.values(), EQUINOX, FLAX, TORCH, COMPILED)
# What can be left out: peers, and kernels that are asked for by name.
OPTIONAL = {
    "flax": (FLAX,),
    "torch": (TORCH, COMPILED),
    "torch.compile": (COMPILED,),
    **{kernel: (name,) for kernel, name in OURS_BY.items() if name not in (AUTO, XLA)},
}


def left_out(without: Collection[str], *, gpu: bool, torch_compile: bool) -> dict[str, str]:
    """Contenders that there will not be, and why: `without` are keys of `OPTIONAL`."""
    found = {name: "as was asked for" for peer in without for name in OPTIONAL[peer]}
    if not gpu:
        kernels = (name for name in OURS_BY.values() if name not in (AUTO, XLA))
        found |= dict.fromkeys(kernels, "a kernel is for a GPU")
    if importlib.util.find_spec("flax") is None:
        found.setdefault(FLAX, "not installed")
    if TORCH not in found and (why := gpu_run_torch.missing(gpu)):
        found |= dict.fromkeys((TORCH, COMPILED), why)
    if not torch_compile:
        found.setdefault(COMPILED, "only in the whole job, on a GPU")
    return found


class Made(NamedTuple):
    """`apply(layer, state, x) -> (y, state)`, on a whole batch."""

    layer: Any
    state: Any
    apply: Apply


# Of so many channels, which are the second axis of x; and whether a ReLU follows.
MakeBatchNorm = Callable[[int, bool], Made]
# Of rows of so many values.
MakeLayerNorm = Callable[[int], Made]


def over_batch(layer: Any, state: Any, x: jax.Array) -> Any:
    mapped = jax.vmap(layer, axis_name=AXIS, in_axes=(0, None), out_axes=(0, None))
    return mapped(x, state)


def _ours(implementation: Any, channels: int, relu: bool) -> Made:
    layer, state = eqx.nn.make_with_state(BatchNorm)(
        channels,
        AXIS,
        EPS,
        momentum=MOMENTUM,
        approach="batch",
        activation=jax.nn.relu if relu else None,
        implementation=implementation,
    )
    return Made(layer, state, over_batch)


def _equinox(channels: int, relu: bool) -> Made:
    make = eqx.nn.make_with_state(eqx.nn.BatchNorm)
    layer, state = make(channels, AXIS, EPS, momentum=MOMENTUM, mode="batch")

    def apply(layer: Any, state: Any, x: jax.Array) -> Any:
        y, state = over_batch(layer, state, x)
        return (jax.nn.relu(y) if relu else y).astype(x.dtype), state

    return Made(layer, state, apply)


def _flax(channels: int, relu: bool) -> Made:
    from flax import linen  # pyright: ignore[reportMissingImports]  (only with the peers)

    def apply(layer: Any, state: Any, x: jax.Array) -> Any:
        norm = linen.BatchNorm(
            use_running_average=False, axis=1, momentum=MOMENTUM, epsilon=EPS, dtype=x.dtype
        )
        variables = {"params": layer, "batch_stats": state}
        y, after = norm.apply(variables, x, mutable=["batch_stats"])
        return jax.nn.relu(y) if relu else y, after["batch_stats"]

    zeros, ones = jnp.zeros(channels), jnp.ones(channels)
    return Made({"scale": ones, "bias": zeros}, {"mean": zeros, "var": ones}, apply)


def _no_norm(channels: int, relu: bool) -> Made:
    return Made(None, None, lambda _, state, x: (jax.nn.relu(x) if relu else x, state))


def _over_rows(layer: Any, state: Any, x: jax.Array) -> Any:
    return jax.vmap(layer)(x), state


def _our_layer_norm(implementation: Any, values: int) -> Made:
    return Made(LayerNorm(values, EPS, implementation=implementation), None, _over_rows)


def _equinox_layer_norm(values: int) -> Made:
    return Made(eqx.nn.LayerNorm(values, EPS), None, _over_rows)


def _flax_layer_norm(values: int) -> Made:
    from flax import linen  # pyright: ignore[reportMissingImports]  (only with the peers)

    def apply(layer: Any, state: Any, x: jax.Array) -> Any:
        return linen.LayerNorm(epsilon=EPS, dtype=x.dtype).apply({"params": layer}, x), state

    return Made({"scale": jnp.ones(values), "bias": jnp.zeros(values)}, None, apply)


BATCH_NORMS: dict[str, MakeBatchNorm] = {
    **{OURS_BY[name]: functools.partial(_ours, name) for name in IMPLEMENTATIONS},
    EQUINOX: _equinox,
    FLAX: _flax,
    NO_NORM: _no_norm,
}
LAYER_NORMS: dict[str, MakeLayerNorm] = {
    **{OURS_BY[name]: functools.partial(_our_layer_norm, name) for name in IMPLEMENTATIONS},
    EQUINOX: _equinox_layer_norm,
    FLAX: _flax_layer_norm,
}


def made_for(problem: Problem, name: str) -> Made:
    if problem.kind == BATCH_NORM:
        return BATCH_NORMS[name](problem.shape[1], True)
    return LAYER_NORMS[name](problem.shape[1])


def with_affine(layer: Any, weight: Any, bias: Any) -> Any:
    """The layer with these for its parameters."""
    if isinstance(layer, dict):  # Flax's
        return {"scale": weight, "bias": bias}
    return eqx.tree_at(lambda layer: (layer.weight, layer.bias), layer, (weight, bias))


def affine_of(layer: Any) -> tuple[Any, Any]:
    """Weight and bias of a layer, or their gradients."""
    if isinstance(layer, dict):
        return layer["scale"], layer["bias"]
    return layer.weight, layer.bias
