"""Defines `TrainingBatch`: the moments of a batch, the layer's `eps` and the step."""

import dataclasses

import equinox as eqx
from jaxtyping import Array, Float, Int

from ._moments import Moments, degrees_of_freedom
from ._numbers import Floats


# A subclass of `Moments`, because strategies return the batch as the moments to use, merge it,
# and remember it.
class TrainingBatch(Moments):
    """Holds the moments of a training batch, which the layer passes to `update`.

    `merge`, `towards` and `astype` return plain `Moments`, and `dataclasses.replace` returns a
    `TrainingBatch`.

    **Fields:** those of `Moments`, and

    - `eps`: the layer's `eps`, a Python float, static.
    - `step`: the number of batches remembered before this one, an int32 scalar.
    - `unbiased`: the layer's `unbiased`, a bool, static.
    """

    # Always known, unlike that of `Moments`.
    count: Floats  # pyright: ignore[reportIncompatibleVariableOverride]
    eps: float = eqx.field(static=True, kw_only=True)
    step: Int[Array, ""] = eqx.field(kw_only=True)
    # Not `ddof`, which is that of `variance`: a batch is normalised by its biased variance.
    unbiased: bool = eqx.field(default=False, static=True, kw_only=True)

    @property
    def memory_variance(self) -> Float[Array, "*sets channels"]:
        """Returns `m2 / (count - unbiased)`, the variance for the running statistics. It is
        finite even for `count <= unbiased`; the layer does not remember such a batch."""
        return self.m2 / degrees_of_freedom(self._expanded_count, int(self.unbiased))

    @property
    def moments(self) -> Moments:
        """Returns the moments without `eps`, `step` and `unbiased`."""
        return Moments(self.count, self.mean_pair, self.m2, self.ddof)

    def with_moments(self, moments: Moments) -> "TrainingBatch":
        """Returns a batch with these moments and the `eps`, `step` and `unbiased` of this one.
        The `count` of this one replaces a `count` of `None`."""
        if moments.count is None:
            moments = Moments.of(moments.mean_pair, moments.m2, self.count)
        count, mean, m2 = moments.count, moments.mean_pair, moments.m2
        return dataclasses.replace(self, count=count, mean_pair=mean, m2=m2)
