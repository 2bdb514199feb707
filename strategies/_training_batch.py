"""Defines `TrainingBatch`: the moments of a batch, the layer's `eps` and the step."""

import dataclasses

import equinox as eqx
from jaxtyping import Array, Int

from ._moments import Moments


class TrainingBatch(Moments):
    """Holds the moments of a training batch, which the layer passes to `update`.

    `merge`, `towards` and `astype` return plain `Moments`, and `dataclasses.replace` returns a
    `TrainingBatch`.

    **Fields:** those of `Moments`, and

    - `eps`: the layer's `eps`, a Python float, static.
    - `step`: the number of batches remembered before this one, an int32 scalar.
    """

    eps: float = eqx.field(static=True, kw_only=True)
    step: Int[Array, ""] = eqx.field(kw_only=True)

    @property
    def moments(self) -> Moments:
        """Returns the moments without `eps` and `step`."""
        return Moments(self.count, self.mean_pair, self.m2, self.ddof)

    def with_moments(self, moments: Moments) -> "TrainingBatch":
        """Returns a batch with these moments and the same `ddof`, `eps` and `step`."""
        count, mean, m2 = moments.count, moments.mean_pair, moments.m2
        return dataclasses.replace(self, count=count, mean_pair=mean, m2=m2)
