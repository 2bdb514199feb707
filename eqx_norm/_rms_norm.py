"""Defines `RMSNorm`."""

from typing import ClassVar

import equinox as eqx

from eqx_norm._example import AbstractShapeNorm


class RMSNorm(AbstractShapeNorm, eqx.nn.RMSNorm, init=False):
    r"""Divides one example by the root mean square of its values; replaces `eqx.nn.RMSNorm`.

    $$y = \frac{x}{\sqrt{\frac{1}{n} \sum_i |x_i|^2 + \varepsilon}} \cdot \gamma + \beta$$

    where $\gamma$ (`weight`) and $\beta$ (`bias`) have the shape of `x`. The mean square is
    float32 or better; no mean is computed. Only `x` is saved for the backward pass.

    ```python
    layer = RMSNorm(64, use_bias=False)
    y = jax.vmap(jax.vmap(layer))(x)                     # x is [N, T, 64]
    ```

    **Arguments:** as for `LayerNorm`, with `eps` added to the mean square.

    **Raises:** `ValueError` for an invalid argument.

    Zhang and Sennrich, "Root Mean Square Layer Normalization",
    https://arxiv.org/abs/1910.07467.
    """

    centred: ClassVar[bool] = False
