"""Compares fixed cases of tests/fuzz.py with their formulas.

tests/devices/over_uses.py has cases over several devices, `make fuzz` has new ones.
"""

from dataclasses import replace

import jax
import pytest

from tests import fuzz

pytestmark = pytest.mark.x32  # has its own dtypes
# Their programs take longer than three seconds to compile.
SLOW = "0 1 3 4 16 18 22 23 28 32 45 46 47 60 65 66 71 73 76 77 84"
DRAWN = [seed for seed in range(160) if str(seed) not in SLOW.split()]
# What complex numbers for a real x raise has tests of its own (test_dtypes.py).
SEEDS = [seed for seed in DRAWN if not fuzz.draw(seed).refused][:100]


@pytest.mark.parametrize(
    "seed", [*SEEDS[:30], *(pytest.param(seed, marks=pytest.mark.long) for seed in SEEDS[30:])]
)
def test_random_uses_of_layers_equal_their_formulas(seed):
    """Tests values, dtypes, derivatives, running statistics and counts. Bits of rows are those
    of optimised programs, and have tests in test_rows.py."""
    case = fuzz.small(replace(fuzz.draw(seed), devices=""))
    problems = fuzz.run(case, compares_bits=False)
    assert not problems, fuzz.command(case)
    if seed in SEEDS[24::25]:
        jax.clear_caches()  # the caches would take gigabytes
