"""Tests the count of bytes in a compiled program, and the verdicts on these counts."""

import math

import pytest

from experiments import compiled
from experiments.common import traffic

# x has 4,096 bytes. The GPU backend writes programs like this one, and the TPU backend layouts
# with tiles: arrays in S(1) cost nothing, copies the bytes of the other end.
PROGRAM = """\
%fused_reduce (param_0: f32[4,256], param_1: f32[4,256]) -> (f32[256], bf16[4,256]) {
  %param_0 = f32[4,256]{1,0} parameter(0)
  %param_1 = f32[4,256]{1,0} parameter(1)
  %reduce = f32[256]{0} reduce(%param_0, %zero), dimensions={0}, to_apply=%add
  ROOT %both = (f32[256]{0}, /*index=1*/bf16[4,256]{1,0}) tuple(%reduce, %param_1)
}
%inner (param_2: bf16[4,256]) -> f32[1,256] {
  %param_2 = bf16[4,256]{1,0:T(8,128)(2,1)} parameter(0)
  %convert = f32[4,256]{1,0:T(8,128)} convert(%param_2)
  ROOT %slice = f32[1,256]{1,0:T(8,128)} slice(%convert), slice={[0:1], [0:256]}
}
%outer (param_3: bf16[4,256], param_4: f32[256]) -> f32[1,256] {
  %param_4 = f32[256]{0:T(256)S(1)} parameter(1)
  %param_3 = bf16[4,256]{1,0:T(8,128)(2,1)} parameter(0)
  %row = f32[1,256]{1,0:T(8,128)} fusion(%param_3), kind=kLoop, calls=%inner
  ROOT %sum = f32[1,256]{1,0:T(8,128)} add(%row, %param_4)
}
ENTRY %main (x: f32[4,256], w: f32[256]) -> f32[1,256] {
  %x = f32[4,256]{1,0} parameter(0), metadata={op_name="f(x)"}
  %w = f32[256]{0:T(256)} parameter(1)
  %view = f32[4,256]{1,0} bitcast(%x)
  %sums = (f32[256]{0}, bf16[4,256]{1,0}) fusion(%x, /*index=1*/%view), calls=%fused_reduce
  %low = bf16[4,256]{1,0} get-tuple-element(%sums), index=1
  %copy-start = (f32[256]{0:T(256)S(1)}, f32[256]{0:T(256)}, u32[]{:S(2)}) copy-start(%w)
  %copy-done = f32[256]{0:T(256)S(1)} copy-done(%copy-start)
  %sum-start = f32[256]{0} all-reduce-start(%w), to_apply=%add
  %sum-done = f32[256]{0} all-reduce-done(%sum-start)
  %slice-start = ((bf16[4,256]{1,0}), bf16[2,256]{1,0:S(1)}, s32[]{:S(2)}) slice-start(%low)
  %slice-done = bf16[2,256]{1,0:S(1)} slice-done(%slice-start)
  ROOT %first = f32[1,256]{1,0:T(8,128)} fusion(%low, %copy-done), calls=%outer
}
"""


def test_moved_bytes_of_a_program():
    # x and its view are the same memory. One row of `low` is read, and written as f32.
    expected = {"sums": 4096 + 1024 + 2048, "copy-done": 1024, "slice-done": 1024}
    expected |= {"sum-start": 1024 + 1024, "first": 512 + 1024}
    assert traffic.moved(PROGRAM) == expected
    assert traffic.sent(PROGRAM) == 1024
    for opcode in ("while", "all-to-all-start"):
        with pytest.raises(NotImplementedError, match=rf"%view = {opcode}\(...\)"):
            traffic.moved(PROGRAM.replace("bitcast", opcode))


@pytest.mark.parametrize("target", compiled.MOST)
def test_verdicts_on_units_of_memory_traffic(target):
    for claim, (*case, most) in compiled.MOST[target].items():
        row = dict(
            zip(compiled.CASE, (next(iter(values), ()) for values in case), strict=False)
        )
        for units, holds in ((most, True), (most + 0.01, False), (math.inf, False)):
            verdicts = compiled.moves_little(target, [{**row, "units": units}])
            assert (claim, holds) in [(name, verdict) for name, _, verdict in verdicts]


ROW = {"program": "LayerNorm", "shape": (8, 4), "direction": compiled.BOTH, "dtype": "float32"}
PAIR = [{**ROW, "layer": layer, "units": 8, "temporary": 1} for layer in compiled.TWO]


@pytest.mark.parametrize("field", ["units", "temporary"])
def test_verdicts_and_goals_compare_with_equinox(field):
    for more, held in ((0.069, True), (0.071, False), (math.inf, False)):
        ours = {**PAIR[0], field: PAIR[0][field] + more}
        verdicts, goals = compiled.is_no_worse([ours, PAIR[1]])
        assert not goals
        assert [holds for *_, holds in verdicts].count(False) == (not held)
        case = "LayerNorm, 8x4, forward + backward, eqx-norm, float32"
        assert all(case in measured for _, measured, _ in verdicts)
        (program, shape), reason = next(iter(compiled.LIMITS.items()))
        limited = [{**row, "program": program, "shape": shape} for row in (ours, PAIR[1])]
        _, goals = compiled.is_no_worse(limited)
        assert [goal[2] for goal in goals] == [reason] * (not held)


def test_claim_and_goal_of_programs_that_jit_splits():
    sizes = (1.06, 0.07), (1.09, 0.08), (1.11, 0)
    for (units, sent), held, more in zip(
        sizes, ((1, 1), (1, 0), (0, 1)), (0, 1, 1), strict=True
    ):
        values = compiled.MANY, units, 1.0, 1.0, sent
        row = PAIR[0] | dict(zip(compiled.OF_MESH, values, strict=True))
        claims, goal = compiled.is_split_well([row])
        assert tuple(holds for *_, holds in claims) == held
        assert goal[1].startswith(f"{more} of 1")


def test_table_cell_has_units_of_both_layers():
    rows = [PAIR[0], {**PAIR[1], "units": 9, "temporary": 0}]
    assert "8.00 (1.00) / 9.00" in compiled.beside("H200", rows)[1]


@pytest.mark.parametrize("bad", [{}, {"kept": 41}, {"atomics": 1}])
def test_verdicts_on_atomics_and_recomputation(bad):
    usual = {"recomputes": False, "kept": 100, "temporaries": 100, "moved": 100}
    other = {"recomputes": True, "kept": 40, "temporaries": 75, "moved": 115, **bad}
    rows = [{"layer": compiled.OURS, **row} for row in (usual, other)]
    steps = [{**row, "dtype": dtype} for dtype in compiled.DTYPES for row in rows]
    atomics, saving = (
        compiled.adds_in_order([{"atomics": 0, **bad}]),
        compiled.recomputing_saves(steps),
    )
    assert (atomics[2], saving[2]) == ("atomics" not in bad, "kept" not in bad)
