"""Defines `TrainingBatch`: the moments of a batch, with the layer's `eps` and the step."""

import equinox as eqx
from jaxtyping import Array, Int

from ._moments import Moments


class TrainingBatch(Moments):
    """Holds the moments of a training batch, as the layer hands them to `update`.

    It can be used as `Moments` everywhere. `merge`, `towards` and `astype` return plain
    `Moments`; `dataclasses.replace` returns a `TrainingBatch`.

    **Fields:** those of `Moments`, and

    - `eps`: the layer's, static: a Python float.
    - `step`: how many batches the memory has taken in before this one, an int32 scalar that
        stops at 2^31 - 1. Batches that were not remembered do not count.
    """

    eps: float = eqx.field(static=True, kw_only=True)
    step: Int[Array, ""] = eqx.field(kw_only=True)

    @property
    def moments(self) -> Moments:
        """Returns the moments without `eps` and `step`, to be remembered."""
        return Moments(self.count, self.mean, self.m2, self.mean_rest, self.ddof)
