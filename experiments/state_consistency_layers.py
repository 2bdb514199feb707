"""The layers that are compared, each as its users make it, at one eps and one momentum.

The momentum is the share of the running average that an update leaves. It is near 0, so that
the average is nearly the batch's; and a power of two, so that what is left of the old average
can be taken out again: (after - momentum * before) / (1 - momentum) is what an update took in.
"""

import functools
import importlib
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from eqx_norm import BatchNorm, _normalise

from .lab.peers.names import OURS
from .state_consistency_rows import Setting
from .state_consistency_subject import Average, Make, Memory, OfJax, Pure, Subject, average_of
from .state_consistency_ways import JIT, OP_BY_OP, WAYS, Apply

EPS = 1e-3  # that of the thread's script
MOMENTUM = 1 / 16
UNBIASED = f"{OURS}, unbiased"
# Where a training step fails, these are what it raises.
ERRORS = (TypeError, ValueError, NotImplementedError, RuntimeError)


class Layer(NamedTuple):
    name: str
    package: str  # that has to be installed
    make: Callable[[Setting], Subject]
    unbiased: bool = False  # whether its running variance has the factor n/(n-1)
    ways: tuple[str, ...] = tuple(WAYS)
    usual: str = JIT


def _module(layer: eqx.nn.BatchNorm, state: eqx.nn.State, **how_to_read: Any) -> Pure:
    parameters, static = eqx.partition(layer, eqx.is_array)

    def mode(inference: bool) -> Apply:
        def apply(parameters: Any, state: Any, x: jax.Array) -> tuple[jax.Array, Any]:
            model = eqx.nn.inference_mode(eqx.combine(parameters, static), inference)
            return jax.vmap(model, (0, None), (0, None), axis_name="batch")(x, state)

        return apply

    return Pure(parameters, state, mode(False), mode(True), **how_to_read)


def _ours(channels: int, implementation: Any, *, unbiased: bool) -> Pure:
    layer, state = eqx.nn.make_with_state(BatchNorm)(
        channels,
        "batch",
        eps=EPS,
        momentum=MOMENTUM,
        approach="batch",
        unbiased=unbiased,
        implementation=implementation,
    )

    def read(state: eqx.nn.State) -> tuple[Any, ...]:
        running = state.get(layer.memory_index)
        return running.mean, running.variance, running.weight

    def average(memory: Memory) -> Average:
        # What is remembered is debiased: the average from 0, divided by its weight.
        mean, variance, weight = (array.astype(np.float64) for array in memory)
        return mean * weight, variance * weight

    def rejected(state: eqx.nn.State) -> float:
        return float(state.get(layer.rejected_index))

    return _module(layer, state, read=read, average=average, rejected=rejected)


def _equinox(channels: int, _: str, *, mode: Literal["ema", "batch"]) -> Pure:
    layer, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(
        channels, "batch", eps=EPS, momentum=MOMENTUM, mode=mode
    )
    ema = mode == "ema"
    statistics: Any = layer.ema_state_index if ema else layer.batch_state_index
    rest: Any = layer.ema_first_time_index if ema else layer.batch_counter

    def read(state: eqx.nn.State) -> tuple[Any, ...]:
        return *state.get(statistics), state.get(rest)

    def average(memory: Memory) -> Average | None:
        # Its first batch replaces what is there.
        return None if ema and memory[2] else average_of(memory)

    return _module(layer, state, read=read, average=average)


# Both Flax APIs keep their statistics under these names.
def _read_flax(statistics: Any) -> tuple[Any, ...]:
    return statistics["mean"], statistics["var"]


def _of_flax(parameters: Any, statistics: Any, apply: Callable[..., Any]) -> Pure:
    def mode(infer: bool) -> Apply:
        def channels_second(parameters: Any, statistics: Any, x: jax.Array) -> Any:
            y, after = apply(parameters, statistics, jnp.moveaxis(x, 1, -1), infer)
            return jnp.moveaxis(y, -1, 1), after

        return channels_second

    return Pure(parameters, statistics, mode(False), mode(True), _read_flax)


def _linen(channels: int, _: str) -> Pure:
    from flax import linen  # pyright: ignore[reportMissingImports]  (only .venv-peers has it)

    def apply(parameters: Any, statistics: Any, x: jax.Array, infer: bool) -> Any:
        layer = linen.BatchNorm(infer, momentum=MOMENTUM, epsilon=EPS, dtype=x.dtype)
        variables = {"params": parameters, "batch_stats": statistics}
        y, after = layer.apply(variables, x, mutable=["batch_stats"])
        return y, after["batch_stats"]

    zeros, ones = jnp.zeros(channels), jnp.ones(channels)
    return _of_flax({"scale": ones, "bias": zeros}, {"mean": zeros, "var": ones}, apply)


def _nnx(channels: int, _: str) -> Pure:
    from flax import nnx  # pyright: ignore[reportMissingImports]  (only .venv-peers has it)

    def apply(parameters: Any, statistics: Any, x: jax.Array, infer: bool) -> Any:
        layer = nnx.BatchNorm(
            channels, momentum=MOMENTUM, epsilon=EPS, dtype=x.dtype, rngs=nnx.Rngs(0)
        )
        nnx.update(layer, {**parameters, **statistics})
        y = layer(x, use_running_average=infer)
        return y, nnx.to_pure_dict(nnx.state(layer, nnx.BatchStat))

    zeros, ones = jnp.zeros(channels), jnp.ones(channels)
    return _of_flax({"scale": ones, "bias": zeros}, {"mean": zeros, "var": ones}, apply)


def _jax(name: str, package: str, make: Make, *, unbiased: bool = False) -> Layer:
    return Layer(name, package, functools.partial(OfJax, make), unbiased)


def _torch(name: str, *, operator: bool) -> Layer:
    def make(setting: Setting) -> Subject:
        # torch is imported by that module, and only where it is asked for.
        module = importlib.import_module(".state_consistency_torch", __package__)
        return module.OfTorch(setting, operator=operator)

    ways = (OP_BY_OP, "checkpoint, op by op")
    return Layer(name, "torch", make, unbiased=True, ways=ways, usual=OP_BY_OP)


LAYERS = (
    _jax(OURS, "eqx_norm", functools.partial(_ours, unbiased=False)),
    _jax(UNBIASED, "eqx_norm", functools.partial(_ours, unbiased=True), unbiased=True),
    _jax("Equinox ema", "equinox", functools.partial(_equinox, mode="ema")),
    _jax("Equinox batch", "equinox", functools.partial(_equinox, mode="batch")),
    _jax("Flax linen", "flax", _linen),
    _jax("Flax nnx", "flax", _nnx),
    _torch("PyTorch", operator=False),
    # What its layer calls, without the check that comes before.
    _torch("torch.batch_norm", operator=True),
)
BY_NAME = {layer.name: layer for layer in LAYERS}
# What the package itself needs is always there.
ALWAYS = tuple(layer for layer in LAYERS if layer.package in ("eqx_norm", "equinox"))


def missing(layers: Iterable[Layer]) -> tuple[str, ...]:
    """The packages among those of `layers` that are not installed here."""
    return tuple(p for p in dict.fromkeys(x.package for x in layers) if not find_spec(p))


def implementations() -> tuple[tuple[str, ...], dict[str, str]]:
    """This layer's implementations that can run here; and why the others cannot."""
    run, cannot = [], {}
    for name in get_args(_normalise.Implementation):
        setting = Setting(OURS, name, "float32", (2, 1), JIT, backward=True)
        try:
            BY_NAME[OURS].make(setting).train(np.ones(setting.shape, np.float32))
        except ERRORS as error:
            if name in ("auto", "xla"):  # which run everywhere
                raise
            cannot[name] = f"{type(error).__name__}: {error}"
        else:
            run.append(name)
    return tuple(run), cannot
