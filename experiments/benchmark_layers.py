"""The contestants of the benchmark: batch norm + ReLU in training, each in its own words.

Every JAX contestant is brought to one form, `apply(parameters, state, x) -> (y, state)` on
plain arrays, so that calling it costs the same Python for all of them: what is timed is the
layer. Parameters are a (weight, bias) per layer, for a stack of one layer or of many.
"""

import dataclasses
import importlib.util
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from eqx_norm import BatchNorm

AXIS = "batch"
MOMENTUM = 0.99
EPS = 1e-5

Parameters = tuple[tuple[Array, Array], ...]
State = tuple[Array, ...]
Apply = Callable[[Parameters, State, Array], tuple[Array, State]]
Pass = Literal["forward", "forward + backward"]
BOTH: Pass = "forward + backward"
PASSES: tuple[Pass, ...] = ("forward", BOTH)


class Numbers(NamedTuple):
    """What every contestant is given: x and dy are [N, C, *spatial], the rest [C]; f32."""

    x: NDArray[np.float32]
    dy: NDArray[np.float32]
    weight: NDArray[np.float32]
    bias: NDArray[np.float32]


class Outputs(NamedTuple):
    """What every contestant gives back; y and dx are [N, C, *spatial]."""

    y: NDArray[Any]
    dx: NDArray[Any]
    dweight: NDArray[Any]
    dbias: NDArray[Any]


@dataclasses.dataclass(frozen=True)
class Program:
    """Something to time: `wait(call())` returns when its result is there."""

    call: Callable[[], Any]
    wait: Callable[[Any], Any] = jax.block_until_ready


class Peer(NamedTuple):
    """One contestant: how a stack of `depth` layers is made, and where its channels are."""

    make: Callable[[int, jnp.dtype, int], tuple[Apply, State]]
    channels_last: bool = False
    dtypes: tuple[str, ...] = ("f32", "bf16")


DTYPES = {"f32": jnp.dtype(jnp.float32), "bf16": jnp.dtype(jnp.bfloat16)}


def mixed(x: Array, weight: Array, axis: int) -> Array:
    """A linear layer over the channels, a convolution of size 1: what stands between two norms
    in a network, and keeps XLA from fusing them."""
    matrix = jnp.outer(weight, weight).astype(x.dtype) / len(weight)
    return jnp.moveaxis(jnp.tensordot(x, matrix, (axis, 0)), -1, axis)


def _equinox(
    make_layers: Callable[[], list[Any]], activation: Callable[[Array], Array]
) -> tuple[Apply, State]:
    layers, state = eqx.nn.make_with_state(make_layers)()
    leaves, structure = jax.tree.flatten(state)
    _, static = eqx.partition(layers, eqx.is_array)

    def apply(parameters: Parameters, leaves: State, x: Array) -> tuple[Array, State]:
        filled = eqx.tree_at(
            lambda layers: [a for layer in layers for a in (layer.weight, layer.bias)],
            static,
            [a for affine in parameters for a in affine],
            is_leaf=lambda leaf: leaf is None,
        )

        def one(x: Array, state: eqx.nn.State) -> tuple[Array, eqx.nn.State]:
            dtype = x.dtype
            for layer in filled:
                if len(filled) > 1:
                    x = mixed(x, layer.weight, 0)
                x, state = layer(x, state)
                # Equinox's layer returns f32 for bf16: in a network it has to be cast.
                x = activation(x).astype(dtype)
            return x, state

        over_batch = jax.vmap(one, axis_name=AXIS, in_axes=(0, None), out_axes=(0, None))
        y, state = over_batch(x, jax.tree.unflatten(structure, leaves))
        return y, tuple(jax.tree.leaves(state))

    return apply, tuple(leaves)


def _ours(
    implementation: Literal["auto", "device_invariant"],
) -> Callable[..., tuple[Apply, State]]:
    def make(channels: int, dtype: jnp.dtype, depth: int) -> tuple[Apply, State]:
        def layer() -> BatchNorm:
            return BatchNorm(
                channels,
                AXIS,
                EPS,
                momentum=MOMENTUM,
                approach="batch",
                activation=jax.nn.relu,
                implementation=implementation,
            )

        return _equinox(lambda: [layer() for _ in range(depth)], lambda y: y)

    return make


def _theirs(mode: Literal["ema", "batch"]) -> Callable[..., tuple[Apply, State]]:
    def make(channels: int, dtype: jnp.dtype, depth: int) -> tuple[Apply, State]:
        def layer() -> eqx.nn.BatchNorm:
            return eqx.nn.BatchNorm(channels, AXIS, EPS, momentum=MOMENTUM, mode=mode)

        return _equinox(lambda: [layer() for _ in range(depth)], jax.nn.relu)

    return make


def _linen(channels: int, dtype: jnp.dtype, depth: int) -> tuple[Apply, State]:
    from flax import linen  # pyright: ignore[reportMissingImports]  (only with the peers)

    layers = [
        linen.BatchNorm(use_running_average=False, momentum=MOMENTUM, epsilon=EPS, dtype=dtype)
        for _ in range(depth)
    ]
    empty = jnp.zeros((1, channels), dtype)
    statistics = [layer.init(jax.random.key(0), empty)["batch_stats"] for layer in layers]
    leaves, structure = jax.tree.flatten(statistics)

    def apply(parameters: Parameters, leaves: State, x: Array) -> tuple[Array, State]:
        statistics = []
        old = jax.tree.unflatten(structure, leaves)
        for layer, (weight, bias), mine in zip(layers, parameters, old, strict=True):
            if len(layers) > 1:
                x = mixed(x, weight, -1)
            variables = {"params": {"scale": weight, "bias": bias}, "batch_stats": mine}
            x, after = layer.apply(variables, x, mutable=["batch_stats"])
            x = jax.nn.relu(x)
            statistics.append(after["batch_stats"])
        return x, tuple(jax.tree.leaves(statistics))

    return apply, tuple(leaves)


def _nnx(channels: int, dtype: jnp.dtype, depth: int) -> tuple[Apply, State]:
    from flax import nnx  # pyright: ignore[reportMissingImports]  (only with the peers)

    split = []
    for _ in range(depth):
        layer = nnx.BatchNorm(
            channels, momentum=MOMENTUM, epsilon=EPS, dtype=dtype, rngs=nnx.Rngs(0)
        )
        split.append(nnx.split(layer, nnx.Param, nnx.BatchStat))
    graphs, affine, statistics = zip(*split, strict=True)
    leaves, structure = jax.tree.flatten(statistics)

    def apply(parameters: Parameters, leaves: State, x: Array) -> tuple[Array, State]:
        new = []
        old = jax.tree.unflatten(structure, leaves)
        for graph, form, (weight, bias), mine in zip(
            graphs, affine, parameters, old, strict=True
        ):
            filled = jax.tree.unflatten(jax.tree.structure(form), (bias, weight))  # by name
            layer = nnx.merge(graph, filled, mine)
            if len(graphs) > 1:
                x = mixed(x, weight, -1)
            x = jax.nn.relu(layer(x))
            new.append(nnx.state(layer, nnx.BatchStat))
        return x, tuple(jax.tree.leaves(new))

    return apply, tuple(leaves)


OURS, INVARIANT = "eqx-norm", "device invariant"
EQUINOX = ("equinox ema", "equinox batch")
FLAX = ("flax linen", "flax nnx")
JAX_LAYERS = {
    OURS: Peer(_ours("auto")),
    INVARIANT: Peer(_ours("device_invariant")),
    # The mode "ema" mixes bf16 and f32 in one `select`, and fails.
    "equinox ema": Peer(_theirs("ema"), dtypes=("f32",)),
    "equinox batch": Peer(_theirs("batch")),
    "flax linen": Peer(_linen, channels_last=True),
    "flax nnx": Peer(_nnx, channels_last=True),
}


def available(names: Iterable[str]) -> tuple[list[str], list[str]]:
    """Those of the contestants that are installed, and those that are not."""
    needs = {name: name.split()[0] for name in names if name.split()[0] in ("flax", "torch")}
    missing = [n for n, package in needs.items() if importlib.util.find_spec(package) is None]
    return [name for name in names if name not in missing], missing
