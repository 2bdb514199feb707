"""Defines `InstanceNorm`, which normalises each channel of one example."""

from jax.typing import DTypeLike

from eqx_norm._group_norm import GroupNorm
from eqx_norm._normalise import Activation, Implementation


class InstanceNorm(GroupNorm):
    r"""Normalises each channel of one example over its positions.

    It is a `GroupNorm` whose groups are single channels, with the arguments of PyTorch's
    `InstanceNorm1d`, `2d` and `3d` but those of its running statistics. (Equinox has none.)

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
        implementation: Implementation = "auto",
    ):
        """**Arguments:** as for `GroupNorm`; and `affine`: whether there are weight and bias
        per channel, as in PyTorch not so unless given.

        **Raises:** `ValueError` for an argument that makes no sense, saying what would.
        """
        how = {"activation": activation, "implementation": implementation}
        super().__init__(channels, channels, eps, affine, dtype, **how)
