"""Defines a row of the matrix: what is run, and what came of it."""

import math
from typing import NamedTuple

from experiments.lab.peers import names

OURS = (names.OURS, names.OURS_UNBIASED)
# Those whose running variance has the factor n/(n-1).
UNBIASED = (names.OURS_UNBIASED, names.TORCH, names.TORCH_OPERATOR)
FINITE = "finite"


class Row(NamedTuple):
    # What is run.
    layer: str
    implementation: str  # empty where the layer has no choice
    dtype: str
    shape: tuple[int, ...]  # batch, channels, *spatial
    way: str
    backward: bool
    batch: str = FINITE  # or which number that is not finite the second batch holds
    # What came of it. NaN: it cannot be told here, or has no meaning.
    raised: str = ""  # by the training call
    while_tracing: bool = False  # whether it raises as soon as shapes are known
    evaluation_changed: bool = False  # whether an evaluation changed the memory
    difference: float = math.nan  # largest, of the evaluations before and after one update
    # How many updates of the running average a training call made: the first, the second.
    updates_1: float = math.nan
    updates_2: float = math.nan
    # Relative errors of what was taken into the average, the larger of two updates.
    mean_error: float = math.nan
    biased_error: float = math.nan
    unbiased_error: float = math.nan
    # Means, variances, and what else is remembered: at first, after each training call. In the
    # shortest digits that tell float32 numbers apart, so that bits can be compared.
    memory_0: str = ""
    memory_1: str = ""
    memory_2: str = ""
    # How many numbers are NaN or infinite: in outputs, gradients and memory while training
    # on finite batches; in the evaluations after each training call; in the last evaluation
    # and the memory, some batches after one that was not finite.
    nonfinite_training: int = 0
    nonfinite_evaluation: int = 0
    nonfinite_later: int = 0
    rejected: float = math.nan  # how many batches the layer says it has rejected

    @property
    def setting(self) -> tuple[object, ...]:
        """Returns the fields that say what is run."""
        return self[: self._fields.index("raised")]

    @property
    def n(self) -> int:
        """Returns how many values a channel has."""
        return math.prod(self.shape) // self.shape[1]

    @property
    def values(self) -> str:
        """Returns what its batches are, in words."""
        return f"{self.dtype} {'x'.join(map(str, self.shape))}"

    @property
    def unbiased(self) -> bool:
        return self.layer in UNBIASED

    @property
    def variance_error(self) -> float:
        """Returns the error of that variance which the layer says it remembers."""
        return self.unbiased_error if self.unbiased else self.biased_error
