"""Compares fixed cases of tests/fuzz.py with their formulas.

tests/devices/over_uses.py has cases over several devices, `make fuzz` has new ones.
"""

from dataclasses import replace

import jax
import pytest

from tests import fuzz

pytestmark = pytest.mark.x32  # has its own dtypes
# Of the first seeds, those whose programs compile in less than three seconds.
SEEDS: list[int] = []


@pytest.mark.parametrize("seed", SEEDS)
def test_random_uses_of_layers_equal_their_formulas(seed):
    """Tests values, dtypes, derivatives, running statistics and counts, and bits of rows."""
    case = fuzz.small(replace(fuzz.draw(seed), devices=""))
    problems = fuzz.run(case)
    assert not problems, fuzz.command(case)
    if seed in SEEDS[24::25]:
        jax.clear_caches()  # the caches would take gigabytes
