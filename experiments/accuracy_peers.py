"""The layers that are compared: this one, Equinox's, Flax's and PyTorch's.

Each is used as its users would: parameters in float32, trained for one step on the batch,
the output in the dtype of the input where the layer leaves the choice. Its momentum is set so
that the running variance after that step is the variance of the batch.
"""

import functools
import importlib.util
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from eqx_norm import BatchNorm

from .accuracy_cases import EPS, Batch
from .accuracy_reference import Answer

OURS = "eqx-norm"


class Layer(NamedTuple):
    name: str
    package: str  # that has to be installed
    answer: Callable[[Batch], Answer]


# (weight, bias, x), with the channels of x second, to (y, variance of the batch).
Forward = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, ArrayLike]]


def _in_jax(forward: Forward, channels_last: bool = False) -> Callable[[Batch], Answer]:
    @jax.jit
    def differentiate(weight: Any, bias: Any, x: Any, dy: Any) -> tuple[Any, ...]:
        y, pull_back, variance = jax.vjp(forward, weight, bias, x, has_aux=True)
        dweight, dbias, dx = pull_back(dy.astype(y.dtype))
        return y, variance, dx, dweight, dbias

    def answer(batch: Batch) -> Answer:
        x, dy = batch.x, batch.dy
        if channels_last:
            x, dy = np.moveaxis(x, 1, -1), np.moveaxis(dy, 1, -1)
        gave = differentiate(batch.weight, batch.bias, x, dy)
        y, variance, dx, dweight, dbias = (np.asarray(array, np.float32) for array in gave)
        if channels_last:
            y, dx = np.moveaxis(y, -1, 1), np.moveaxis(dx, -1, 1)
        return Answer(y, variance, dx, dweight, dbias)

    return answer


def _over_batch(
    layer: eqx.nn.BatchNorm, state: eqx.nn.State, weight: Any, bias: Any, x: Any
) -> tuple[jax.Array, eqx.nn.State]:
    layer = eqx.tree_at(lambda layer: (layer.weight, layer.bias), layer, (weight, bias))
    return jax.vmap(layer, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)


def _ours(weight: Any, bias: Any, x: Any) -> tuple[jax.Array, jax.Array]:
    make = eqx.nn.make_with_state(BatchNorm)
    layer, state = make(x.shape[1], "batch", eps=EPS, approach="batch")
    y, state = _over_batch(layer, state, weight, bias, x)
    # The first batch is remembered to the bit.
    return y, state.get(layer.memory_index).variance


def _equinox(mode: Literal["ema", "batch"]) -> Forward:
    def forward(weight: Any, bias: Any, x: Any) -> tuple[jax.Array, jax.Array]:
        make = eqx.nn.make_with_state(eqx.nn.BatchNorm)
        layer, state = make(x.shape[1], "batch", eps=EPS, momentum=0.0, mode=mode)
        y, state = _over_batch(layer, state, weight, bias, x)
        index: Any = layer.ema_state_index if mode == "ema" else layer.batch_state_index
        return y, state.get(index)[1]

    return forward


def _linen(fast: bool) -> Forward:
    from flax import linen  # pyright: ignore[reportMissingImports]  (only make accuracy has it)

    def forward(weight: Any, bias: Any, x: Any) -> tuple[jax.Array, jax.Array]:
        layer = linen.BatchNorm(
            use_running_average=False,
            momentum=0.0,
            epsilon=EPS,
            dtype=x.dtype,
            use_fast_variance=fast,
        )
        channels = jnp.zeros(x.shape[-1])
        variables = {
            "params": {"scale": weight, "bias": bias},
            "batch_stats": {"mean": channels, "var": channels},
        }
        y, after = layer.apply(variables, x, mutable=["batch_stats"])
        return y, after["batch_stats"]["var"]

    return forward


def _nnx(fast: bool) -> Forward:
    from flax import nnx  # pyright: ignore[reportMissingImports]  (only make accuracy has it)

    def forward(weight: Any, bias: Any, x: Any) -> tuple[jax.Array, jax.Array]:
        layer = nnx.BatchNorm(
            x.shape[-1],
            momentum=0.0,
            epsilon=EPS,
            dtype=x.dtype,
            use_fast_variance=fast,
            rngs=nnx.Rngs(0),
        )
        nnx.update(layer, {"scale": weight, "bias": bias})
        y = layer(x, use_running_average=False)
        return y, nnx.to_pure_dict(nnx.state(layer, nnx.BatchStat))["var"]

    return forward


def _torch(batch: Batch) -> Answer:
    import torch  # pyright: ignore[reportMissingImports]  (only make accuracy has it)

    def tensor(values: np.ndarray) -> Any:
        # By way of float32, since torch reads no bfloat16 from NumPy; the values stay.
        copied = torch.from_numpy(np.array(values, np.float32, order="C"))
        return copied.to(getattr(torch, values.dtype.name))

    x, weight, bias = (tensor(v).requires_grad_() for v in (batch.x, batch.weight, batch.bias))
    mean, variance = torch.zeros(len(batch.bias)), torch.ones(len(batch.bias))
    y = torch.nn.functional.batch_norm(
        x, mean, variance, weight, bias, training=True, momentum=1.0, eps=EPS
    )
    y.backward(tensor(batch.dy))
    n = batch.x.size // len(batch.bias)
    gave = (y, variance, x.grad, weight.grad, bias.grad)
    arrays = Answer(*(array.detach().float().numpy() for array in gave))
    # What torch remembers is the unbiased variance.
    return arrays._replace(variance=arrays.variance.astype(np.float64) * (n - 1) / n)


def _flax(forward: Callable[[bool], Forward], fast: bool) -> Callable[[Batch], Answer]:
    """Imports Flax when it is first asked."""
    make = functools.cache(lambda: _in_jax(forward(fast), channels_last=True))
    return lambda batch: make()(batch)


LAYERS = (
    Layer(OURS, "eqx_norm", _in_jax(_ours)),
    Layer("Equinox ema", "equinox", _in_jax(_equinox("ema"))),
    Layer("Equinox batch", "equinox", _in_jax(_equinox("batch"))),
    # Flax's default is the variance of one pass, E[x^2] - E[x]^2: use_fast_variance.
    Layer("Flax linen", "flax", _flax(_linen, fast=True)),
    Layer("Flax nnx", "flax", _flax(_nnx, fast=True)),
    Layer("Flax linen, two-pass", "flax", _flax(_linen, fast=False)),
    Layer("Flax nnx, two-pass", "flax", _flax(_nnx, fast=False)),
    Layer("PyTorch", "torch", _torch),
)
# What the package itself needs is always there.
ALWAYS = tuple(layer for layer in LAYERS if layer.package in ("eqx_norm", "equinox"))


def missing(packages: Iterable[str]) -> tuple[str, ...]:
    """Those that are not installed here."""
    return tuple(
        name for name in dict.fromkeys(packages) if importlib.util.find_spec(name) is None
    )
