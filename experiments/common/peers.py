"""Makes the layers to compare: this package's, Equinox's, Flax's and PyTorch's.

Each layer is used as its users would use it. Layers in JAX all become a `Layer`, functions of
plain arrays, so that each call has the same Python overhead. PyTorch runs eagerly, by separate
functions.

    made = peers.batch_norm("Flax", channels=64, momentum=0.9, eps=1e-5)
    y, memory = made.train((weight, bias), made.memory, x)

Flax and PyTorch are imported only when needed.
"""

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

import eqx_norm
from eqx_norm import BatchNorm

from . import machine, report
from .exact import EPS, Answer, Batch
from .timer import EVICTING, Program

OURS = "eqx-norm"
OURS_SEPARATE = "eqx-norm, separate ReLU"  # a model in which only the import is changed
OURS_PALLAS, OURS_UNBIASED = "eqx-norm, pallas", "eqx-norm, unbiased"
# Equinox's batch norm in its two modes, and its layer norm.
EQUINOX_EMA, EQUINOX_BATCH, EQUINOX = "Equinox ema", "Equinox batch", "Equinox"
# Flax's layers are those of linen; nnx calls the same functions. By default they compute the
# variance in one pass, E[x^2] - E[x]^2: `use_fast_variance`.
FLAX, FLAX_TWO_PASS = "Flax", "Flax, two-pass"
TORCH = "PyTorch"

COLOURS: dict[str, str] = {
    OURS: report.BLUE,
    OURS_SEPARATE: report.BLUE,
    EQUINOX: report.VERMILION,
    EQUINOX_EMA: report.PURPLE,
    EQUINOX_BATCH: report.VERMILION,
    FLAX: report.GREEN,
    FLAX_TWO_PASS: report.SKY,
    TORCH: report.ORANGE,
}

IMPLEMENTATIONS: dict[str, Any] = {OURS_PALLAS: "pallas"}  # "auto" for the others
# Layers that normalise one example, by their names in Equinox, Flax and this package.
LAYER_NORM, GROUP_NORM, RMS_NORM = "LayerNorm", "GroupNorm", "RMSNorm"
CHANNEL_NORM = "LayerNorm, axis=0"  # in Equinox, mapped over the positions
INSTANCE_NORM = "InstanceNorm"  # in Equinox, a group norm with a group for each channel
GROUPS = 8  # of a group norm
AXIS = "batch"  # the mapped axis of layers that take one example
Affine = tuple[Any, Any]  # weight and bias, or `None`
# Maps (weight and bias, memory, x), and a mask if the layer takes one, to y and the new memory.
Apply = Callable[..., tuple[Array, Any]]


class Layer(NamedTuple):
    """Holds a layer as functions of plain arrays.

    Outputs keep the layer's dtype: Equinox's batch norm returns float32 for bfloat16.
    """

    memory: tuple[Array, ...]  # before the first batch
    train: Apply
    evaluate: Apply
    # Maps the memory to running mean and running variance, if it has them.
    statistics: Callable[[Any], tuple[Array, ...]] = lambda memory: ()


def package(name: str) -> str:
    """Returns the package that a peer needs."""
    words = {"eqx-norm": "eqx_norm", "Equinox": "equinox", "Flax": "flax", "PyTorch": "torch"}
    return next(package for word, package in words.items() if name.startswith(word))


def present(names: Iterable[str]) -> tuple[str, ...]:
    """Returns the peers that are installed, and prints which are left out."""
    installed = {name: importlib.util.find_spec(package(name)) is not None for name in names}
    for name in (name for name, there in installed.items() if not there):
        print(f"{name} is left out: {package(name)} is not installed (make experiments has it)")
    return tuple(name for name, there in installed.items() if there)


def batch_norm(
    name: str,
    channels: int,
    *,
    momentum: float,
    eps: float,
    channel_axis: int = 1,
    activation: Callable[[Array], Array] | None = None,
) -> Layer:
    """Returns the batch norm of that name, whose `x` is `[N, channels, *spatial]`.

    `momentum` is the share of the running statistics that a batch keeps. With
    `channel_axis=-1`, for Flax only, `x` is `[N, *spatial, channels]`. The activation is part
    of this package's layer, and follows the layer for `OURS_SEPARATE` and other libraries. The
    activation's output has the dtype of x.
    """
    options: Any = {"momentum": momentum, "eps": eps}
    if package(name) == "eqx_norm":
        if activation is not None and name != OURS_SEPARATE:
            options["activation"], activation = activation, None
        options |= {"approach": "batch", "unbiased": name == OURS_UNBIASED}
        options["implementation"] = IMPLEMENTATIONS.get(name, "auto")
        layer = _stateful(lambda: BatchNorm(channels, AXIS, **options), _of_ours)
    elif package(name) == "equinox":
        options["mode"] = "ema" if name == EQUINOX_EMA else "batch"
        layer = _stateful(lambda: eqx.nn.BatchNorm(channels, AXIS, **options), _of_equinox)
    else:
        layer = _of_flax(name, channels, momentum, eps, channel_axis)

    if activation is None:
        return layer

    def activated(apply: Apply, after: Any, affine: Affine, memory: Any, x: Array) -> Any:
        y, memory = apply(affine, memory, x)
        return after(y).astype(x.dtype), memory

    train, evaluate = (partial(activated, f, activation) for f in (layer.train, layer.evaluate))
    return layer._replace(train=train, evaluate=evaluate)


def example_norm(
    kind: str, name: str, shape: tuple[int, ...], *, eps: float, groups: int = GROUPS
) -> Layer:
    """Returns the layer of this kind and name, whose `x` is `[N, *shape]`; it has no memory.

    Weight and bias may be `None`. They have `shape`; those of a group or instance norm have the
    first axis of `shape`, in Flax the last.
    """

    def apply(affine: Affine, memory: Any, *x_and_mask: Array) -> tuple[Array, Any]:
        weight, bias = (parameter is not None for parameter in affine)
        library: Any = eqx.nn if package(name) == "equinox" else eqx_norm
        options = {"implementation": IMPLEMENTATIONS[name]} if name in IMPLEMENTATIONS else {}
        if kind == INSTANCE_NORM and library is eqx_norm:
            layer = library.InstanceNorm(shape[0], eps, weight, **options)
        elif kind in (GROUP_NORM, INSTANCE_NORM):
            number = groups if kind == GROUP_NORM else shape[0]
            layer = library.GroupNorm(number, shape[0], eps, weight, **options)
        elif kind == CHANNEL_NORM:
            options = {"axis": 0} if library is eqx_norm else {}
            layer = library.LayerNorm(shape[0], eps, weight, bias, **options)
        else:
            layer = getattr(library, kind)(shape, eps, weight, bias, **options)
        call: Any = _with_affine(layer, affine)
        if kind == CHANNEL_NORM and library is eqx.nn:
            for _ in shape[1:]:
                call = jax.vmap(call, 1, 1)
        return jax.vmap(_masked(call))(*x_and_mask), memory

    def in_flax(affine: Affine, memory: Any, x: Array) -> tuple[Array, Any]:
        axes = tuple(range(1, 1 + len(shape)))
        options: Any = {"reduction_axes": axes, "feature_axes": axes}
        if kind == GROUP_NORM:
            options = {"num_groups": GROUPS}
        options["use_scale"] = affine[0] is not None
        if kind != RMS_NORM:  # which has no bias
            options["use_bias"] = affine[1] is not None
        y, _ = _apply_flax(kind, name, x, affine, {}, epsilon=eps, **options)
        return y, memory

    used = in_flax if package(name) == "flax" else apply
    return Layer((), used, used)


def _stateful(make: Callable[[], Any], statistics: Callable[..., tuple[Array, ...]]) -> Layer:
    """Maps a layer that takes one example and a state over a batch."""
    layer, state = eqx.nn.make_with_state(make)()
    leaves, structure = jax.tree.flatten(state)

    def mode(inference: bool) -> Apply:
        def apply(affine: Affine, memory: Any, *given: Array) -> tuple[Array, Any]:
            model = eqx.nn.inference_mode(_with_affine(layer, affine), inference)
            one = _masked(model, jax.tree.unflatten(structure, memory))
            y, state = jax.vmap(one, axis_name=AXIS, out_axes=(0, None))(*given)
            return y, tuple(jax.tree.leaves(state))

        return apply

    def read(memory: Any) -> tuple[Array, ...]:
        return statistics(layer, jax.tree.unflatten(structure, memory))

    return Layer(tuple(leaves), mode(False), mode(True), read)


def _masked(layer: Any, *state: Any) -> Callable[..., Any]:
    """Returns a layer as a function of x and, if there is one, a mask."""
    return lambda x, *mask: layer(x, *state, **dict(zip(("mask",), mask, strict=False)))


def _with_affine(layer: Any, affine: Affine) -> Any:
    return eqx.tree_at(
        lambda layer: (layer.weight, layer.bias),
        layer,
        affine,
        is_leaf=lambda leaf: leaf is None,
    )


def _of_ours(layer: Any, state: eqx.nn.State) -> tuple[Array, ...]:
    running = layer.running(state)
    return running.mean, running.variance


def _of_equinox(layer: Any, state: eqx.nn.State) -> tuple[Array, ...]:
    is_ema = layer.mode == "ema"
    return state.get(layer.ema_state_index if is_ema else layer.batch_state_index)


def _of_flax(name: str, channels: int, momentum: float, eps: float, axis: int) -> Layer:
    options = {"axis": axis, "momentum": momentum, "epsilon": eps}

    def apply(inference: bool, affine: Affine, memory: Any, x: Array) -> tuple[Array, Any]:
        statistics = {"batch_stats": {"mean": memory[0], "var": memory[1]}}
        flags = {"use_running_average": inference, **options}
        y, after = _apply_flax("BatchNorm", name, x, affine, statistics, **flags)
        return y, (after["batch_stats"]["mean"], after["batch_stats"]["var"])

    memory = jnp.zeros(channels), jnp.ones(channels)
    return Layer(memory, partial(apply, False), partial(apply, True), lambda memory: memory)


def _apply_flax(
    kind: str, name: str, x: Array, affine: Affine, variables: Any, **options: Any
) -> tuple[Array, Any]:
    """Returns y of Flax's layer, and its new variables."""
    make = getattr(importlib.import_module("flax.linen"), kind)
    layer = make(dtype=x.dtype, use_fast_variance=name == FLAX, **options)
    named = zip(("scale", "bias"), affine, strict=True)
    parameters = {key: value for key, value in named if value is not None}
    return layer.apply({"params": parameters, **variables}, x, mutable=["batch_stats"])


def forward_and_backward(
    apply: Apply, apart: bool = False, frozen: bool = False
) -> Callable[..., Any]:
    """Returns a function from (weight and bias, memory, x, dy) to y, memory and gradients.

    The function is new each time, so `jax.jit` compiles it. With `apart`, dy is available only
    after y, as in a network. If `frozen`, weight and bias have no gradients.
    """

    def both(affine: Any, memory: Any, x: Array, dy: Array, *mask: Array) -> Any:
        def train(affine: Any, x: Array) -> tuple[Array, Any]:
            return apply(affine, memory, x, *mask)

        if frozen:
            y, pull_back, after = jax.vjp(lambda x: train(affine, x), x, has_aux=True)
            return y, after, pull_back(dy.astype(y.dtype))
        y, pull_back, after = jax.vjp(train, affine, x, has_aux=True)
        if apart:
            y, dy = jax.lax.optimization_barrier((y, dy))
        return y, after, pull_back(dy.astype(y.dtype))

    return both


@functools.cache
def _evictor_of_torch() -> Callable[[], object]:
    return torch().ones(EVICTING).neg_


@functools.cache
def torch() -> Any:
    """Returns the package torch, set to use as many threads as XLA."""
    package = importlib.import_module("torch")
    package.set_num_threads(machine.cores())
    return package


def tensor(values: NDArray[Any]) -> Any:
    """Returns a tensor of these values and their dtype, bfloat16 included."""
    # The values go through float64, exactly, because torch cannot read NumPy's bfloat16.
    copied = torch().from_numpy(np.array(values, np.float64, order="C"))
    return copied.to(getattr(torch(), values.dtype.name))


def array(values: Any) -> NDArray[Any]:
    """Returns a tensor as a NumPy array: float64 unchanged, other dtypes as float32."""
    values = values.detach().cpu()
    return (values if values.dtype == torch().float64 else values.float()).numpy()


def _channel_axis(kind: str | None, name: str) -> int:
    """Returns the axis of the channels, in Flax the last by default."""
    return -1 if package(name) == "flax" and kind in (None, GROUP_NORM) else 1


def _layer(kind: str | None, name: str, shape: tuple[int, ...], **of_batch_norm: Any) -> Layer:
    """Returns the layer of that kind for examples `[channels, *spatial]`, a batch norm for
    `None`."""
    if kind is not None:
        return example_norm(kind, name, shape, eps=EPS)
    axis = _channel_axis(kind, name)
    return batch_norm(name, shape[0], eps=EPS, channel_axis=axis, **of_batch_norm)


def function(
    kind: str | None, name: str, batch: Batch, *, train: bool
) -> tuple[Any, tuple[Any, ...]]:
    """Returns a layer as a function, and its arguments, which include the given arrays.

    The layer is of that kind, or a batch norm and ReLU for `None`. In training the function
    returns y, memory and ((dweight, dbias), dx), in inference y.
    """
    x, dy, *affine = batch
    made = _layer(kind, name, x.shape[1:], momentum=0.99, activation=jax.nn.relu)
    x, dy = (jnp.moveaxis(values, 1, _channel_axis(kind, name)) for values in (x, dy))
    if train:
        # On a GPU dy is available only after y, as in a network.
        both = forward_and_backward(made.train, apart=jax.default_backend() == "gpu")
        return both, (tuple(affine), made.memory, x, dy)
    # All statistics are 1, because before any batch some layers compute 0/0.
    memory = jax.tree.map(jnp.ones_like, made.memory)
    return lambda *given: made.evaluate(*given)[0], (tuple(affine), memory, x)


def _norm_in_torch(kind: str | None, x: Any, weight: Any, bias: Any, **batch_norm: Any) -> Any:
    """Returns y of PyTorch's norm of that kind, a batch norm for `None`."""
    functional = torch().nn.functional
    if kind is None:
        return functional.batch_norm(x, weight=weight, bias=bias, eps=EPS, **batch_norm)
    if kind == GROUP_NORM:
        return functional.group_norm(x, GROUPS, weight, bias, EPS)
    if kind == RMS_NORM:
        return functional.rms_norm(x, x.shape[1:], weight, EPS)
    return functional.layer_norm(x, x.shape[1:], weight, bias, EPS)


def program_of_torch(kind: str | None, batch: Batch, train: bool, device: str) -> Program:
    """Returns a program that runs a layer, as `function` does, in eager PyTorch."""
    arrays: Any = (None if v is None else tensor(v).to(device) for v in batch)
    x, dy, weight, bias = arrays
    options: dict[str, Any] = {}
    if kind is None:
        memory = torch().zeros_like(weight), torch().ones_like(weight)
        options = {"training": train, "momentum": 0.01}
        options |= zip(("running_mean", "running_var"), memory, strict=True)
    else:  # on a GPU torch needs weights of the dtype of x
        weight, bias = (None if v is None else v.to(x.dtype) for v in (weight, bias))
    inputs = [v.requires_grad_() for v in (x, weight, bias) if v is not None]

    def call() -> Any:
        with torch().set_grad_enabled(train):
            y = _norm_in_torch(kind, x, weight, bias, **options)
            if kind is None:  # in place, which is faster, and common
                y = torch().relu_(y)
        if not train:
            return y
        dx, *of_affine = torch().autograd.grad(y, inputs, dy)
        return y, (), ((*of_affine, *[None] * (bias is None)), dx)

    if x.is_cuda:
        return Program(call, lambda _: torch().cuda.synchronize(), read=array)
    return Program(call, lambda result: result, lambda: _evictor_of_torch()(), array)


def answer(kind: str | None, name: str, batch: Batch) -> Answer:
    """Returns a layer's answer in a training step, in float64. The layer is of this kind, which
    has no variance, or a batch norm for `None`."""
    if package(name) == "torch":
        return _in_torch(kind, batch)
    axis = _channel_axis(kind, name)
    x, dy = (np.moveaxis(values, 1, axis) for values in (batch.x, batch.dy))
    double = x.dtype == np.float64
    with jax.enable_x64(double):
        layer, step = _step(double, kind, name, batch.x.shape[1:])
        y, memory, (affine, dx) = step((batch.weight, batch.bias), layer.memory, x, dy)
    _, variance = layer.statistics(memory) or (None, None)
    y, dx = (np.moveaxis(values, axis, 1) for values in (y, dx))
    return _answer(y, variance, dx, *affine)


# `_step` is cached, so that a step is compiled once for all batches of a shape.
@functools.cache
def _step(
    double: bool, kind: str | None, name: str, shape: tuple[int, ...]
) -> tuple[Layer, Callable[..., Any]]:
    """Returns the layer, made with or without 64 bits, and its forward and backward pass.

    A batch norm's momentum is such that the new running variance is that of the batch.
    """
    # This package rejects a momentum of 0. It always stores the first batch unchanged.
    momentum = 0.5 if package(name) == "eqx_norm" else 0.0
    layer = _layer(kind, name, shape, momentum=momentum)
    return layer, jax.jit(forward_and_backward(layer.train))


def _in_torch(kind: str | None, batch: Batch) -> Answer:
    arrays = batch.x, batch.weight, batch.bias
    leaves = [None if values is None else tensor(values).requires_grad_() for values in arrays]
    x, weight, bias = leaves
    options, variance = {}, None
    if kind is None:
        channels = batch.x.shape[1]
        mean, variance = (tensor(np.full(channels, start, np.float32)) for start in (0, 1))
        options = {"running_mean": mean, "running_var": variance}
        options |= {"training": True, "momentum": 1.0}
    y = _norm_in_torch(kind, x, weight, bias, **options)
    y.backward(tensor(batch.dy))
    if kind is None:
        n = batch.x.size // batch.x.shape[1]  # torch stores the unbiased variance
        variance = array(variance).astype(float) * (n - 1) / n
    gradients = (None if leaf is None else array(leaf.grad) for leaf in leaves)
    return _answer(array(y), variance, *gradients)


def _answer(*arrays: Any) -> Answer:
    return Answer(*(None if a is None else np.asarray(a, np.float64) for a in arrays))
