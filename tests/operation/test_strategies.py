"""Compares derivatives up to second order through each strategy with tests/oracle.py."""

import pytest

from tests.processes import on_devices

CODE = """
from tests.fuzz import STRATEGIES, Case, run

options = {"layer": "BatchNorm", "channels": 2, "spatial": (3,), "weights": "own"}
steps = "train", "train", "infer"
for approach in STRATEGIES:
    for others in (
        {"of": "vjp of vjp", "activation": "gelu", "steps": steps[:2]},
        {"of": "vjp", "mask": "position", "steps": steps},
    ):
        problems = run(Case(approach=approach, **options, **others))
        assert not problems, (approach, problems)
"""


@pytest.mark.long
def test_derivatives_through_each_strategy():
    on_devices(8, "-c", CODE)
