"""Defines `BatchNorm`: it gathers moments, asks the approach which to use, and normalises."""

# The inherited fields that a strategy's memory replaces are declared as class variables, which
# is how a dataclass drops a field; pyright takes it for a mistake. They have no value: whoever
# asks for one learns that it is not there.
# pyright: reportIncompatibleVariableOverride=false

from collections.abc import Hashable, Sequence
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Bool, Int, PRNGKeyArray

from eqx_norm import _approach, _arguments, _contract, _memory, _normalise
from eqx_norm._normalise import Activation, BatchImplementation
from eqx_norm._training import Options, Remembered, step
from eqx_norm.strategies import AbstractStrategy


class BatchNorm(eqx.nn.BatchNorm):
    r"""Normalises each channel over the batch and its spatial axes; drop-in for
    `equinox.nn.BatchNorm`.

    $$y = \frac{x - \mu}{\sqrt{\sigma^2 + \varepsilon}} \cdot \gamma + \beta$$

    per channel, with learnable $\gamma$ (`weight`) and $\beta$ (`bias`). Which mean $\mu$ and
    variance $\sigma^2$ are used is the `approach`'s to decide:

    | approach | a training batch is normalised by | inference by |
    | --- | --- | --- |
    | `"batch"` | its own statistics | the debiased running statistics |
    | `"ema"` | the running statistics, this batch included | the same |
    | `"adam"` | the debiased running statistics | the same |
    | `"smooth_start"` | the running statistics, what is not yet filled from the batch | the debiased ones |
    | `"variance_clip"` | as `"batch"`, its variance clipped to near the running one | the debiased ones |

    The layer takes one example and is to be used under `jax.vmap`:

    ```python
    def forward(model, state, x):
        return jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)

    model, state = eqx.nn.make_with_state(BatchNorm)(3, "batch", approach="batch")
    y, state = forward(model, state, x)                     # training: x is [N, 3, H, W]
    y, _ = forward(eqx.nn.inference_mode(model), state, x)  # inference
    ```

    **Where it differs from `eqx.nn.BatchNorm`:** the default is `approach="batch"`, where
    Equinox's is `mode="ema"`; `dtype` is not that of the statistics; inference is right from
    the first step (Equinox's `mode="batch"` starts its running variance at one, then debiases
    it as if from zero); a constant channel gives exactly `bias`; the output has the dtype of
    the input; `axis_name` is static, so that a layer may be passed through `jax.jit`.

    **Statistics** are computed in float32 at least, and remembered in float32 (float64 under
    x64) whatever the dtypes of input and weights. They change exactly once per training call,
    and never in inference; no gradient flows into them. A training batch whose statistics are
    not finite is normalised like any other but leaves the memory as it was;
    `state.get(layer.rejected_index)` counts such batches, `accepted_index` those remembered.

    **It is an `eqx.nn.BatchNorm`.** Models ask `isinstance(layer, eqx.nn.BatchNorm)` to know
    which of their layers take a state, so this is a subclass of it. Equinox forbids virtual
    subclasses (`abc.ABCMeta.register`), so it is a real one, that overrides everything: of the
    parent's fields it keeps `weight`, `bias`, `axis_name`, `inference`, `input_size`, `eps`,
    `channelwise_affine` and `momentum`; `mode` and the four indices of running statistics
    give way to `approach`, `memory_index`, `accepted_index` and `rejected_index`.

    **The same bits on 1, 2, 4 and 8 devices** are what `implementation="device_invariant"` is
    for: of outputs, statistics, memory, and the gradients of x, weight and bias in reverse
    mode. The batch is split evenly and in its order, over a power of two of devices, by
    `jax.shard_map(..., check_vma=False)` around the `vmap`, with
    `axis_name=("batch", "devices")` (or by `jax.jit`, which is slower); the approach and the
    activation are made of elementwise operations. Sums then have an order of their own, and
    every operation is rounded by itself: about twice the time at most. Inside `shard_map` the
    first device has the gradients of weight and bias, and the others 0. Sum them over devices,
    or take their mean, as one does with the rest of a model; here that changes no bit.

    Ioffe and Szegedy, "Batch Normalization", https://arxiv.org/abs/1502.03167; the approaches
    are those of https://github.com/patrick-kidger/equinox/issues/659.
    """  # noqa: E501 (rows of the table)

    approach: AbstractStrategy[Any]
    memory_index: eqx.nn.StateIndex[Any]
    accepted_index: eqx.nn.StateIndex[Int[Array, ""]]
    rejected_index: eqx.nn.StateIndex[Int[Array, ""]]
    axis_name: Hashable | tuple[Hashable, ...] = eqx.field(static=True)
    momentum: float | None = eqx.field(static=True)
    activation: Activation | None
    unbiased: bool = eqx.field(static=True)
    implementation: BatchImplementation = eqx.field(static=True)

    mode: ClassVar[None]
    ema_first_time_index: ClassVar[None]
    ema_state_index: ClassVar[None]
    batch_counter: ClassVar[None]
    batch_state_index: ClassVar[None]

    def __init__(
        self,
        input_size: int,
        axis_name: Hashable | Sequence[Hashable],
        eps: float = 1e-5,
        channelwise_affine: bool = True,
        momentum: float = _approach.Unsaid(0.99),
        inference: bool = False,
        dtype: DTypeLike | None = None,
        approach: str | AbstractStrategy[Any] | None = None,
        *,
        mode: str | None = None,
        activation: Activation | None = None,
        unbiased: bool = False,
        implementation: BatchImplementation = "auto",
    ):
        """**Arguments:**

        - `input_size`: the number of channels.
        - `axis_name`: the name of the batch axis, as given to `jax.vmap`; or several names,
            to take statistics over several axes.
        - `eps`: added to the variance; greater than 0.
        - `channelwise_affine`: whether there are a weight and a bias per channel.
        - `momentum`: the share of the running statistics that one batch leaves as it was,
            strictly between 0 and 1. It is handed to an approach given by name. (PyTorch's
            `momentum` is the other share.)
        - `inference`: whether to normalise by what is remembered instead of the batch; toggle
            it with `eqx.nn.inference_mode`.
        - `dtype`: of weight and bias; `float32` (`float64` under x64) unless given. A complex
            dtype makes a layer for complex input.
        - `approach`: `"batch"`, `"ema"`, `"adam"`, `"smooth_start"`, `"variance_clip"`, or a
            strategy object (`eqx_norm.strategies`). Where neither it nor `mode` is given, it
            is `"batch"` (Equinox's default is `"ema"`), and a warning says so, once.
        - `mode`: what Equinox calls `approach`: `"batch"` or `"ema"`, so that a call written
            for `eqx.nn.BatchNorm` means here what it meant there. By position, the eighth
            argument of either is the same, too.
        - `activation`: an elementwise callable, `jax.nn.relu` for example, applied to the
            normalised values before they are rounded to the dtype of `x`. It is the same as
            applying it to the layer's output, in less time and memory: nothing of it is kept
            for the backward pass, which computes it again. A callable module
            (`eqx.nn.PReLU`) is trained with the layer. What is not seen to be elementwise
            (`jax.nn.softmax`) is applied to each example as it stands; what has no forward
            derivative (a `jax.custom_vjp`), too, and then its input is kept.
        - `unbiased`: whether the running variance takes the factor n/(n-1), as in PyTorch, or
            not, as in Equinox, Flax and Haiku. Training batches are normalised by the biased
            variance either way.
        - `implementation`: `"auto"` takes, on a CUDA device, a kernel for the sums over x where
            it serves and is worth its launch, and XLA elsewhere; `"xla"`, `"pallas_triton"`
            and `"pallas_mosaic"` (whole lines of channels, from an H100 and jax 0.12 on) take
            no other, and the latter two are an error where they cannot serve.
            `"device_invariant"` gives the same bits on any number of devices (above). `"plain"`
            is made of JAX's own primitives, for tools that know no others, in more time and
            memory; in inference `"auto"` is, too.

        **Raises:** `ValueError` for an argument that makes no sense, saying what would.
        """
        if not isinstance(input_size, int | np.integer) or input_size < 1:
            raise ValueError(
                f"input_size={input_size!r}: it is the number of channels, an int of 1 or more."
            )
        dtype = _arguments.weight_dtype(dtype)
        _normalise.check(implementation, BatchImplementation)
        self.approach = _approach.resolve(approach, mode, momentum)
        self.weight = jnp.ones((input_size,), dtype) if channelwise_affine else None
        self.bias = jnp.zeros((input_size,), dtype) if channelwise_affine else None
        self.memory_index = eqx.nn.StateIndex(
            self.approach.init(input_size, _memory.statistics_dtype(dtype))
        )
        self.accepted_index = eqx.nn.StateIndex(jnp.zeros((), jnp.int32))
        self.rejected_index = eqx.nn.StateIndex(jnp.zeros((), jnp.int32))
        # A list of names would make the layer unhashable.
        self.axis_name = tuple(axis_name) if isinstance(axis_name, list) else axis_name
        self.inference = inference
        self.input_size = int(input_size)
        self.eps = _arguments.checked_eps(eps)
        self.channelwise_affine = channelwise_affine
        self.momentum = getattr(self.approach, "momentum", None)
        self.activation = _normalise.as_tree(activation)
        self.unbiased = unbiased
        self.implementation = implementation

    @jax.named_scope("eqx_norm.BatchNorm")
    def __call__(
        self,
        x: Array | np.ndarray,
        state: eqx.nn.State,
        *,
        key: PRNGKeyArray | None = None,
        inference: bool | Bool[Array, ""] | None = None,
        mask: Bool[ArrayLike, "..."] | None = None,
    ) -> tuple[Array, eqx.nn.State]:
        """**Arguments:**

        - `x`: one example, `(input_size, *spatial)`, float or complex, under a `vmap` that
            binds `axis_name`.
        - `state`: the `eqx.nn.State` that holds this layer's memory.
        - `key`: ignored; there for compatibility with the rest of Equinox.
        - `inference`: takes priority over `self.inference` where it is not `None`.
        - `mask`: which values count: one bool for the example, or one for each position (of
            a shape that broadcasts to `spatial`). The others, padding for example, are left
            out of the statistics; their outputs are 0 and so are their gradients, whatever
            they hold. Examples may have different numbers of values that count.

        **Returns:** the normalised `x`, of the same shape and dtype, and the state after
        this batch (the state as it was in inference, after a batch that is masked out as a
        whole, and after one that leaves one value for an unbiased variance).

        **Raises:** `NameError` where no enclosing `vmap` binds `axis_name` (in training);
        `ValueError` for a wrong shape, a state that is not this layer's, or, with
        `unbiased=True`, a batch of one value per channel; `TypeError` for integers. Each is
        raised before the state is touched, so the state given in can be used again.
        """
        del key
        x = jnp.asarray(x)  # NumPy's float64 is float32 without x64
        inference = self.inference if inference is None else inference
        if not isinstance(inference, jax.Array):
            inference = bool(inference)  # NumPy's, too
        memory = _memory.recall(state, self.memory_index, self.approach, self.input_size)
        before = Remembered(
            memory, state.get(self.accepted_index), state.get(self.rejected_index)
        )
        self._check_input(x, memory)
        mask = _check_mask(mask, x)
        if inference is True:
            return self._affine(x, mask, jax.lax.stop_gradient(memory)), state
        layer = self.approach, self.activation, self.weight, self.bias
        options = Options(self.axis_name, self.eps, self.unbiased, self.implementation)
        flag = None if inference is False else inference  # jax.jit traces the flag
        y, after = step(x, mask, flag, before, layer, options)
        # Last of all: from here on nothing can fail, and the old state is used up.
        state = state.set(self.memory_index, after.memory)
        state = state.set(self.accepted_index, after.accepted)
        state = state.set(self.rejected_index, after.rejected)
        return y, state

    def _affine(self, x: Array, mask: Array | None, memory: Any) -> Array:
        """Returns x normalised by what is remembered. That is an affine map, which needs no
        passes of its own: who reads programs, to export them for example, meets JAX's own
        operations alone."""
        is_plain = self.implementation != "device_invariant"
        implementation: Any = "plain" if is_plain else self.implementation
        values = _normalise.Values(x, self.axis_name, mask, implementation)
        used = _contract.infer(self.approach, memory, self.input_size)
        return values.normalise(
            used, self.weight, self.bias, eps=self.eps, activation=self.activation
        )

    def _check_input(self, x: Array, memory: Any) -> None:
        if x.ndim == 0 or x.shape[0] != self.input_size:
            raise ValueError(
                f"x has shape {x.shape}, but this layer was made with "
                f"input_size={self.input_size} and takes one example at a time, of shape "
                f"({self.input_size}, *spatial). "
                + (
                    "This looks like a batch: map over it with "
                    f"jax.vmap(model, axis_name={self.axis_name!r}, in_axes=(0, None), "
                    "out_axes=(0, None))."
                    if x.ndim > 1 and x.shape[1] == self.input_size
                    else "Make the layer with the number of channels of its input."
                )
            )
        _arguments.check_inexact(x)
        remembers_complex = any(map(jnp.iscomplexobj, jax.tree.leaves(memory)))
        if jnp.iscomplexobj(x) != remembers_complex:
            raise TypeError(
                f"x has dtype {x.dtype}, but this layer was made for "
                + (
                    "complex input. Write x.astype(jnp.complex64)."
                    if remembers_complex
                    else "real input. Make it with dtype=jnp.complex64."
                )
            )


def _check_mask(mask: Any, x: Array) -> Array | None:
    if mask is None:
        return None
    mask = jnp.asarray(mask)
    spatial = x.shape[1:]
    if mask.dtype != bool:
        raise TypeError(
            f"mask has dtype {mask.dtype}, but it tells which values count: give booleans, for "
            "example mask > 0."
        )
    try:
        fits = jnp.broadcast_shapes(mask.shape, spatial) == spatial
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            f"mask has shape {mask.shape}, but one example of x has the shape {x.shape}: give "
            f"one bool for the example, of shape (), or one for each position, of shape "
            f"{spatial}; the channels share it. Map over the mask as over x: "
            "jax.vmap(lambda x, mask, state: model(x, state, mask=mask), axis_name=..., "
            "in_axes=(0, 0, None), out_axes=(0, None))."
        )
    return mask
