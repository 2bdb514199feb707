"""`TrainingBatch`: the moments of a batch, and what a strategy may ask about the step."""

import equinox as eqx
from jaxtyping import Array, Int

from ._moments import Moments


class TrainingBatch(Moments):
    """The moments of a training batch, as the layer hands them to `update`.

    They are `Moments` in every way; what is made of them by `merge`, `towards` and `astype`
    is plain `Moments`, and `dataclasses.replace` gives a `TrainingBatch` again.

    **Fields:** those of `Moments`, and

    - `eps`: the layer's, static: a Python float.
    - `step`: how many batches the memory has taken in before this one, an int32 scalar, which
        stays at 2^31 - 1. Batches that were not remembered do not count.
    """

    eps: float = eqx.field(static=True, kw_only=True)
    step: Int[Array, ""] = eqx.field(kw_only=True)

    @property
    def moments(self) -> Moments:
        """The same moments without `eps` and `step`, to be remembered."""
        return Moments(self.count, self.mean, self.m2, self.mean_rest, self.ddof)
