"""Tests the count of bytes in a compiled program, and the verdicts on these counts."""

import math

import pytest

from experiments import compiled
from experiments.common import traffic

# x has 4,096 bytes. The GPU backend writes programs like this one.
PROGRAM = """\
%fused_reduce (param_0: f32[4,256], param_1: f32[4,256]) -> (f32[256], bf16[4,256]) {
  %param_0 = f32[4,256]{1,0} parameter(0)
  %param_1 = f32[4,256]{1,0} parameter(1)
  %reduce = f32[256]{0} reduce(%param_0, %zero), dimensions={0}, to_apply=%add
  ROOT %both = (f32[256]{0}, /*index=1*/bf16[4,256]{1,0}) tuple(%reduce, %param_1)
}
%fused_slice (param_2: bf16[4,256]) -> f32[1,256] {
  %param_2 = bf16[4,256]{1,0} parameter(0)
  %convert = f32[4,256]{1,0} convert(%param_2)
  ROOT %slice = f32[1,256]{1,0} slice(%convert), slice={[0:1], [0:256]}
}
ENTRY %main (x: f32[4,256]) -> f32[1,256] {
  %x = f32[4,256]{1,0} parameter(0), metadata={op_name="f(x)"}
  %view = f32[4,256]{1,0} bitcast(%x)
  %sums = (f32[256]{0}, bf16[4,256]{1,0}) fusion(%x, /*index=1*/%view), calls=%fused_reduce
  %low = bf16[4,256]{1,0} get-tuple-element(%sums), index=1
  ROOT %first = f32[1,256]{1,0} fusion(%low), kind=kLoop, calls=%fused_slice
}
"""


# A program of the TPU backend. Arrays in S(1) cost nothing, copies the bytes of the other end.
TPU_PROGRAM = """\
%inner (param_0.1: bf16[4,256]) -> f32[1,256] {
  %param_0.1 = bf16[4,256]{1,0:T(8,128)(2,1)} parameter(0)
  %slice.1 = bf16[1,256]{1,0:T(8,128)(2,1)} slice(%param_0.1), slice={[0:1], [0:256]}
  ROOT %convert.1 = f32[1,256]{1,0:T(8,128)} convert(%slice.1)
}
%outer (param_0.2: bf16[4,256], param_1.2: f32[256]) -> f32[1,256] {
  %param_1.2 = f32[256]{0:T(256)S(1)} parameter(1)
  %param_0.2 = bf16[4,256]{1,0:T(8,128)(2,1)} parameter(0)
  %first = f32[1,256]{1,0:T(8,128)} fusion(%param_0.2), kind=kLoop, calls=%inner
  ROOT %sum = f32[1,256]{1,0:T(8,128)} add(%first, %param_1.2)
}
ENTRY %main (x.1: bf16[4,256], w.1: f32[256]) -> f32[1,256] {
  %x.1 = bf16[4,256]{1,0:T(8,128)(2,1)} parameter(0)
  %w.1 = f32[256]{0:T(256)} parameter(1)
  %copy-start = (f32[256]{0:T(256)S(1)}, f32[256]{0:T(256)}, u32[]{:S(2)}) copy-start(%w.1)
  %copy-done = f32[256]{0:T(256)S(1)} copy-done(%copy-start)
  %slice-start = ((bf16[4,256]{1,0}), bf16[2,256]{1,0:S(1)}, s32[]{:S(2)}) slice-start(%x.1)
  %slice-done = bf16[2,256]{1,0:S(1)} slice-done(%slice-start)
  ROOT %fusion = f32[1,256]{1,0:T(8,128)} fusion(%x.1, %copy-done), calls=%outer
}
"""


# One of the two products is added to the value of another lane without rounding.
PTX = """\
	shfl.sync.bfly.b32	%r13, %r12, 8, 31, -1;
	add.rn.f32 	%r14, %r12, %r13;
	fma.rn.f32 	%r15, %r1, %r2, %r13;
	fma.rn.f32 	%r16, %r1, %r2, %r14;
"""


def test_products_contracted_into_a_sum_over_lanes():
    assert compiled.contracted(PTX) == 1


def test_moved_bytes_of_a_program():
    # x and its view are the same memory. One row of `low` is read, and written as f32.
    assert traffic.moved(PROGRAM) == {"sums": 4096 + 1024 + 2048, "first": 512 + 1024}
    read = {"copy-done": 1024, "slice-done": 1024, "fusion": 512 + 1024}
    assert traffic.moved(TPU_PROGRAM) == read
    for opcode in ("while", "all-reduce-start"):
        with pytest.raises(NotImplementedError, match=rf"%view = {opcode}\(...\)"):
            traffic.moved(PROGRAM.replace("bitcast", opcode))


@pytest.mark.parametrize(
    ("target", "claim"),
    [(target, claim) for target in compiled.MOST for claim in compiled.MOST[target]],
)
def test_verdicts_on_units_of_memory_traffic(target, claim):
    *case, most = compiled.MOST[target][claim]
    row = dict(zip(compiled.CASE, (next(iter(values), ()) for values in case), strict=False))
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
        assert all(
            "LayerNorm, 8x4, forward + backward, eqx-norm, float32" in v[1] for v in verdicts
        )

        (program, shape), reason = next(iter(compiled.LIMITS.items()))
        limited = [{**row, "program": program, "shape": shape} for row in (ours, PAIR[1])]
        _, goals = compiled.is_no_worse(limited)
        assert [goal[2] for goal in goals] == [reason] * (not held)


def test_table_cell_has_units_of_both_layers():
    rows = [PAIR[0], {**PAIR[1], "units": 9, "temporary": 0}]
    assert "8.00 (1.00) / 9.00" in compiled.beside("H200", rows)[1]


BAD = {"kept": 41}, {"atomics": 1}


@pytest.mark.parametrize("bad", [{}, *BAD])
def test_verdicts_on_atomics_and_recomputation(bad):
    usual = {"recomputes": False, "kept": 100, "temporaries": 100, "moved": 100}
    other = {"recomputes": True, "kept": 40, "temporaries": 75, "moved": 115, **bad}
    rows = [{"layer": compiled.OURS, **row} for row in (usual, other)]
    steps = [{**row, "dtype": dtype} for dtype in compiled.DTYPES for row in rows]
    verdicts = (
        compiled.adds_in_order([{"atomics": 0, **bad}]),
        compiled.recomputing_saves(steps),
    )
    assert [holds for *_, holds in verdicts].count(False) == len(bad)
