"""What this layer claims of its accuracy, each with the worst that was measured."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from . import accuracy_cases, results
from .accuracy_cases import CONSTANT, HALF, Case
from .accuracy_measured import Measured
from .accuracy_peers import OURS

# float32 has a relative precision of 6e-8: these leave room for a few roundings of numbers of
# order 1, whatever the mean and the number of values.
Y = DX = 1e-6
VARIANCE, DWEIGHT, DBIAS = 5e-7, 1e-7, 2e-7
CASES = {case.name: case for case in accuracy_cases.CASES}


class Verdict(NamedTuple):
    claim: str
    measured: str
    holds: bool | None  # None: none of its cases was run


class Claim(NamedTuple):
    text: str
    quantities: tuple[str, ...]
    bound: float
    about: Callable[[Case], bool]

    def judge(self, measured: Measured) -> Verdict:
        worst = [
            (error, case)
            for case, layers in measured.items()
            if self.about(CASES[case])
            for error in (getattr(layers[OURS], quantity) for quantity in self.quantities)
        ]
        if not worst:
            return Verdict(self.text, "none of its cases was run", None)
        # NaN, which is neither large nor small, argmax takes for the largest.
        error, case = worst[int(np.argmax([error for error, _ in worst]))]
        said = "0 in every case" if error == 0 else f"{error:.1e} ({case})"
        return Verdict(self.text, said, bool(error <= self.bound))


def _constant(case: Case) -> bool:
    return case.group == CONSTANT


def _half(case: Case) -> bool:
    return case.group == HALF


def _single(case: Case) -> bool:
    return not _half(case)


def _other(case: Case) -> bool:
    return _single(case) and not _constant(case)


def _any(case: Case) -> bool:
    return True


CLAIMS = (
    Claim("1. a constant channel gives exactly its bias", ("y",), 0, _constant),
    Claim("2. and has a variance of exactly 0", ("variance",), 0, _constant),
    Claim("3. y to 1e-6 of max(1, abs(xhat))", ("y",), Y, _other),
    Claim("4. variance to 5e-7 of variance + eps", ("variance",), VARIANCE, _any),
    Claim("5. dx to 1e-6 of max abs(dy) * weight / std", ("dx",), DX, _single),
    Claim("6. dweight to 1e-7 of sum abs(dy) + 4.3 abs(dweight)", ("dweight",), DWEIGHT, _any),
    Claim("7. dbias to 2e-7 of sum abs(dy)", ("dbias",), DBIAS, _any),
    Claim("8. half precision: 3 and 5 plus half an ulp", ("y", "dx"), Y, _half),
    Claim("9. nothing is NaN or infinite", ("nonfinite",), 0, _any),
)


def table(verdicts: Sequence[Verdict]) -> str:
    """Returns the verdicts for the terminal and the README."""
    words = {True: "holds", False: "DOES NOT HOLD", None: "not run"}
    return results.table(
        (f"claim of {OURS}", "worst that was measured", "verdict"),
        [(v.claim, v.measured, words[v.holds]) for v in verdicts],
    )


def judge(measured: Measured) -> list[Verdict]:
    return [claim.judge(measured) for claim in CLAIMS]
