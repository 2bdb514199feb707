"""Defines `GroupNorm`."""

from collections.abc import Hashable, Sequence

import equinox as eqx
from jax.typing import DTypeLike
from jaxtyping import Array, Inexact

from eqx_norm import _arguments
from eqx_norm._example import AbstractExampleNorm, Options
from eqx_norm._normalise import Activation, Implementation


class GroupNorm(AbstractExampleNorm, eqx.nn.GroupNorm):
    r"""Normalises groups of channels of one example; replaces `eqx.nn.GroupNorm`.

    $$y = \frac{x - \mu_g}{\sqrt{\sigma_g^2 + \varepsilon}} \cdot \gamma_c + \beta_c$$

    where $\mu_g$ and $\sigma_g^2$ are the mean and biased variance over all positions of the
    channels of group $g$; each channel has a $\gamma_c$ (`weight`) and a $\beta_c$ (`bias`).
    Channels are the first axis of `x`, and a group is a block of consecutive channels.

    ```python
    layer = GroupNorm(8, 64)
    y = jax.vmap(layer)(x)                               # x is [N, 64, H, W]
    ```

    Precision and residuals are those of `LayerNorm`.

    Wu and He, "Group Normalization", https://arxiv.org/abs/1803.08494.
    """

    def __init__(
        self,
        groups: int,
        channels: int | None = None,
        eps: float = 1e-5,
        channelwise_affine: bool = True,
        dtype: DTypeLike | None = None,
        *,
        activation: Activation | None = None,
        axis_name: Hashable | Sequence[Hashable] = (),
        weight_offset: float = 0.0,
        implementation: Implementation = "auto",
    ):
        """**Arguments:**

        - `groups`: the number of groups; it must divide the number of channels.
        - `channels`: the number of channels; optional if `channelwise_affine=False`.
        - `eps`: added to the variance; 1e-20 or more.
        - `channelwise_affine`: whether there are a weight and a bias of shape `(channels,)`.
        - `axis_name`: as for `LayerNorm`. Groups with the same index are merged over all
            parts, so split positions or, with `groups=1`, channels.
        - `dtype`, `activation`, `weight_offset`, `implementation`: as for `LayerNorm`. (There
            are no kernels for TPUs.)

        **Raises:** `ValueError` for an invalid argument.
        """
        if channels is None and channelwise_affine:
            raise ValueError(
                "channels=None: the layer makes a weight and a bias for each channel, so give "
                "the number of channels, or channelwise_affine=False."
            )
        shape = ()
        if channels is not None:
            shape = (_arguments.checked_size("channels", channels),)
        self.groups = _arguments.checked_size("groups", groups)
        self.channels = shape[0] if shape else None
        if shape:
            self._check_groups(shape[0])
        self.channelwise_affine = bool(channelwise_affine)
        super().__init__(
            shape,
            self.channelwise_affine,
            self.channelwise_affine,
            dtype,
            eps=eps,
            activation=activation,
            axis_name=axis_name,
            weight_offset=weight_offset,
            implementation=implementation,
        )

    def _check_groups(self, channels: int) -> None:
        if channels % self.groups:
            raise ValueError(
                f"groups={self.groups} and channels={channels}: the channels are cut into "
                "groups of equal size, so channels= must be a multiple of groups=."
            )

    def _options(self, x: Inexact[Array, "..."]) -> tuple[Options, tuple[int, ...]]:
        _arguments.check_channels(x, "channels", self.channels, "jax.vmap(layer)(x)")
        self._check_groups(x.shape[0])
        options = Options(
            self.eps, self.implementation, self.axis_name, self.groups, channels=x.shape[0]
        )
        return options, (x.shape[0],)
