"""Tests how bytes are counted in a compiled program, and the verdicts on them."""

import pytest

from experiments import compiled

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


def test_what_a_program_moves():
    # x and its view are the same memory; of `low`, one row is read, and written as f32.
    assert compiled.launches(PROGRAM) == {"sums": 4096 + 1024 + 2048, "first": 512 + 1024}
    with pytest.raises(NotImplementedError, match=r"%view = while\(...\)"):
        compiled.launches(PROGRAM.replace("bitcast", "while"))


@pytest.mark.parametrize("claim", compiled.MOST)
def test_units(claim):
    *case, most = compiled.MOST[claim]
    row = dict(zip(compiled.CASE, (next(iter(values)) for values in case), strict=False))
    for extra, holds in ((0, True), (0.01, False)):
        assert compiled.moves_little([{**row, "units": most + extra}])[0][2] == holds


BAD = {"sends": 3}, {"kept": 41}, {"scatters": 1}, {"ptx": "8 bytes spill"}, {"ptx": "red.add"}


@pytest.mark.parametrize("bad", [{}, *BAD])
def test_the_other_verdicts(bad, tmp_path):
    (tmp_path / "eqx_norm_statistics_0.ptx").write_text(bad.get("ptx", "ld"))
    row = {"way": compiled.SHARD_MAP, "layer": compiled.OURS, "sends": 2, "largest": 2048}
    usual = {"recomputes": False, "kept": 100, "temporaries": 100, "moved": 100}
    other = {"recomputes": True, "kept": 40, "temporaries": 75, "moved": 115, **bad}
    steps = [{**row, **step, "dtype": d} for d in compiled.DTYPES for step in (usual, other)]
    verdicts = compiled.kernels_are_clean(tmp_path), compiled.sends_little([{**row, **bad}])
    scatters = compiled.scatters_nothing([{"scatters": 0, **bad}])
    found = [h for *_, h in (*verdicts, scatters, compiled.recomputing_saves(steps))]
    assert found.count(False) == len(bad)
