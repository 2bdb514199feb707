"""Defines `InstanceNorm`."""

from collections.abc import Hashable, Sequence

from jax.typing import DTypeLike

from eqx_norm._group_norm import GroupNorm
from eqx_norm._normalise import Activation, Implementation


class InstanceNorm(GroupNorm):
    r"""Normalises each channel of one example over its positions, as PyTorch's `InstanceNorm`.

    $$y = \frac{x - \mu_c}{\sqrt{\sigma_c^2 + \varepsilon}} \cdot \gamma_c + \beta_c$$

    This layer is a `GroupNorm` with one channel per group. It has the arguments of PyTorch's
    layer, except those of running statistics.

    ```python
    layer = InstanceNorm(64, affine=True)
    y = jax.vmap(layer)(x)                               # x is [N, 64, H, W]
    ```

    Ulyanov, Vedaldi and Lempitsky, "Instance Normalization", https://arxiv.org/abs/1607.08022.
    """

    def __init__(
        self,
        channels: int,
        eps: float = 1e-5,
        affine: bool = False,
        dtype: DTypeLike | None = None,
        *,
        activation: Activation | None = None,
        axis_name: Hashable | Sequence[Hashable] = (),
        weight_offset: float = 0.0,
        implementation: Implementation = "auto",
    ):
        """**Arguments:** as for `GroupNorm`, and `affine`: whether there are a weight and bias
        of shape `(channels,)`; by default there are none, as in PyTorch.

        **Raises:** `ValueError` for an invalid argument.
        """
        super().__init__(
            channels,
            channels,
            eps,
            affine,
            dtype,
            activation=activation,
            axis_name=axis_name,
            weight_offset=weight_offset,
            implementation=implementation,
        )
