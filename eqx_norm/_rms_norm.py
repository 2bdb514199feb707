"""Defines `RMSNorm`."""

from collections.abc import Hashable, Sequence
from typing import ClassVar

import equinox as eqx
from jax.typing import DTypeLike

from eqx_norm._example import AbstractShapeNorm
from eqx_norm._normalise import Activation, Implementation


class RMSNorm(AbstractShapeNorm, eqx.nn.RMSNorm):
    r"""Divides one example by the root mean square of its values; replaces `eqx.nn.RMSNorm`.

    $$y = \frac{x}{\sqrt{\frac{1}{n} \sum_i |x_i|^2 + \varepsilon}} \cdot \gamma + \beta$$

    where $\gamma$ (`weight`) and $\beta$ (`bias`) have the shape of `x`. The mean square is
    float32 or better; no mean is computed. Only `x` is saved for the backward pass.

    ```python
    layer = RMSNorm(64, use_bias=False)
    y = jax.vmap(jax.vmap(layer))(x)                     # x is [N, T, 64]
    ```

    Zhang and Sennrich, "Root Mean Square Layer Normalization",
    https://arxiv.org/abs/1910.07467.
    """

    centred: ClassVar[bool] = False

    def __init__(
        self,
        shape: int | Sequence[int],
        eps: float = 1e-5,
        use_weight: bool = True,
        use_bias: bool = True,
        dtype: DTypeLike | None = None,
        *,
        activation: Activation | None = None,
        axis: int | None = None,
        axis_name: Hashable | Sequence[Hashable] = (),
        weight_offset: float = 0.0,
        implementation: Implementation = "auto",
    ):
        """**Arguments:** as for `LayerNorm`, with `eps` added to the mean square.

        **Raises:** `ValueError` for an invalid argument.
        """
        weights = use_weight, use_bias, dtype
        others = activation, axis, axis_name, weight_offset, implementation
        super().__init__(shape, eps, *weights, *others)
