"""Compares second derivatives through each strategy, over a mesh, with tests/oracle.py."""

import pytest

from tests.processes import on_devices

CODE = """
from tests.fuzz import STRATEGIES, Case, run

options = {
    "layer": "BatchNorm",
    "channels": 2,
    "axes": (("batch", 4),),
    "devices": "checked",
    "weights": "own",
    "spatial": (3,),
    "mask": "position",
    "activation": "gelu",
    "steps": ("train", "train", "infer"),
    "of": "vjp of vjp",
    "through": True,
}
for approach in STRATEGIES:
    problems = run(Case(approach=approach, **options))
    assert not problems, (approach, problems)
"""


@pytest.mark.long
def test_second_derivatives_through_each_strategy():
    on_devices(8, "-c", CODE)
