"""Defines `TrainingBatch`: the moments of a batch, with the layer's `eps` and the step."""

import dataclasses

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

    def with_moments(self, moments: Moments) -> "TrainingBatch":
        """Returns the batch with these moments; its `ddof`, `eps` and `step` stay."""
        count, mean, m2, rest = moments.count, moments.mean, moments.m2, moments.mean_rest
        return dataclasses.replace(self, count=count, mean=mean, m2=m2, mean_rest=rest)
