"""Defines `LayerNorm`, which normalises each example by its own moments."""

from collections.abc import Sequence
from typing import overload

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, PRNGKeyArray

from eqx_norm import _arguments, _normalise
from eqx_norm._normalise import Activation, Implementation


class LayerNorm(eqx.nn.LayerNorm):
    r"""Normalises all values of one example; drop-in for `equinox.nn.LayerNorm`.

    $$y = \frac{x - \mu}{\sqrt{\sigma^2 + \varepsilon}} \cdot \gamma + \beta$$

    with $\mu$ and $\sigma^2$ the mean and the (biased) variance over the whole of `x`, and
    learnable $\gamma$ (`weight`) and $\beta$ (`bias`) of the shape of `x`.

    ```python
    layer = LayerNorm(64)
    y = jax.vmap(layer)(x)                               # x is [N, 64]
    y = jax.vmap(jax.vmap(layer))(x)                     # x is [N, T, 64]
    ```

    It is the operation of `BatchNorm` with other axes, and keeps its bounds: mean and variance
    in float32 at least and as good at any mean, a constant example gives exactly `bias`, and
    of the size of `x` nothing but `x` itself is kept for the backward pass. (What that is good
    for: https://github.com/Oneflow-Inc/oneflow/issues/6149.)

    It is a subclass of `eqx.nn.LayerNorm`, so that a model which asks for that type needs no
    change.

    Ba, Kiros and Hinton, "Layer Normalization", https://arxiv.org/abs/1607.06450.
    """

    activation: Activation | None
    implementation: Implementation = eqx.field(static=True)

    def __init__(
        self,
        shape: int | Sequence[int],
        eps: float = 1e-5,
        use_weight: bool = True,
        use_bias: bool = True,
        dtype: DTypeLike | None = None,
        *,
        activation: Activation | None = None,
        implementation: Implementation = "auto",
    ):
        """**Arguments:**

        - `shape`: the shape of the input, all of which is normalised together. To normalise
            the last axes only, give their shape and `jax.vmap` the layer over the others.
        - `eps`: added to the variance; greater than 0.
        - `use_weight`, `use_bias`: whether there is a weight, a bias, per value.
        - `dtype`: of weight and bias; `float32` (`float64` under x64) unless given.
        - `activation`: as for `BatchNorm`: an elementwise callable, applied to the result
            before it is rounded to the dtype of `x`, and computed again in the backward pass.
        - `implementation`: as for `BatchNorm`. The kernels read a row once each way, where it
            fits into the registers of one program. `"plain"` is JAX's own primitives.

        **Raises:** `ValueError` for an argument that makes no sense, saying what would.
        """
        sizes = (shape,) if isinstance(shape, int | np.integer) else tuple(shape)
        if not all(isinstance(size, int | np.integer) and size > 0 for size in sizes):
            raise ValueError(
                f"shape={shape!r}: it is the shape of what is normalised together, an int or "
                "several, of 1 or more each."
            )
        dtype = _arguments.weight_dtype(dtype)
        _normalise.check(implementation, Implementation)
        self.shape = tuple(map(int, sizes))
        self.eps = _arguments.checked_eps(eps)
        self.use_weight = bool(use_weight)
        self.use_bias = bool(use_bias)
        self.weight = jnp.ones(self.shape, dtype) if use_weight else None
        self.bias = jnp.zeros(self.shape, dtype) if use_bias else None
        self.activation = _normalise.as_tree(activation)
        self.implementation = implementation

    @overload
    def __call__(self, x: Array | np.ndarray, *, key: PRNGKeyArray | None = None) -> Array: ...

    @overload
    def __call__(
        self, x: Array | np.ndarray, state: eqx.nn.State, *, key: PRNGKeyArray | None = None
    ) -> tuple[Array, eqx.nn.State]: ...

    @jax.named_scope("eqx_norm.LayerNorm")
    def __call__(
        self,
        x: Array | np.ndarray,
        state: eqx.nn.State | None = None,
        *,
        key: PRNGKeyArray | None = None,
    ) -> Array | tuple[Array, eqx.nn.State]:
        """**Arguments:**

        - `x`: one example, of the `shape` that the layer was made with, float or complex.
        - `state`: passed through, so that it may stand where a `BatchNorm` stood.
        - `key`: ignored; there for compatibility with the rest of Equinox.

        **Returns:** the normalised `x`, of the same shape and dtype; and the state, where one
        was given.

        **Raises:** `ValueError` for a wrong shape, `TypeError` for integers.
        """
        del key
        x = jnp.asarray(x)
        self._check_input(x)
        y = _normalise.normalise_row(
            x,
            self.weight,
            self.bias,
            eps=self.eps,
            activation=self.activation,
            implementation=self.implementation,
        )
        return y if state is None else (y, state)

    def _check_input(self, x: Array) -> None:
        extra = x.ndim - len(self.shape)
        mapped = "jax.vmap(" * extra + "layer" + ")" * extra
        if x.shape != self.shape:
            raise ValueError(
                f"x has shape {x.shape}, but this layer was made with shape={self.shape} and "
                "takes one example at a time, of exactly that shape. "
                + (
                    f"This looks like a batch: map over it, {mapped}(x)."
                    if extra > 0 and x.shape[extra:] == self.shape
                    else "Make the layer with the shape of what it is to normalise."
                )
            )
        _arguments.check_inexact(x)
