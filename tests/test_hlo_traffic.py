"""What the traffic of a compiled program is counted to be."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from experiments import gpu_compile, hlo_traffic
from experiments.gpu_compile import BOTH, NO_NORM, OURS, Row

ROOT = Path(__file__).parents[1]

# x and y have 4,096 bytes (2,048 as bf16). The GPU backend writes programs like this one.
PROGRAM = """\
HloModule jit_f, is_scheduled=true, entry_computation_layout={(f32[4,256]{1,0})->f32[256]{0}}

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%fused_reduce (param_0: f32[4,256], param_1: f32[4,256]) -> (f32[256], bf16[4,256]) {
  %param_0 = f32[4,256]{1,0} parameter(0)
  %param_1 = f32[4,256]{1,0} parameter(1)
  %zero = f32[] constant(0)
  %reduce = f32[256]{0} reduce(%param_0, %zero), dimensions={0}, to_apply=%add
  %convert = bf16[4,256]{1,0} convert(%param_1)
  ROOT %both = (f32[256]{0}, /*index=1*/bf16[4,256]{1,0}) tuple(%reduce, %convert)
}

%fused_slice (param_0.1: bf16[4,256]) -> f32[1,256] {
  %param_0.1 = bf16[4,256]{1,0} parameter(0)
  %convert.1 = f32[4,256]{1,0} convert(%param_0.1)
  ROOT %slice = f32[1,256]{1,0} slice(%convert.1), slice={[0:1], [0:256]}
}

%fused_transpose (param_0.2: bf16[4,256]) -> bf16[256,4] {
  %param_0.2 = bf16[4,256]{1,0} parameter(0)
  ROOT %transpose = bf16[256,4]{1,0} transpose(%param_0.2), dimensions={1,0}
}

%graph (in: bf16[4,256]) -> bf16[256,4] {
  %in = bf16[4,256]{1,0} parameter(0)
  ROOT %turned = bf16[256,4]{1,0} fusion(%in), kind=kInput, calls=%fused_transpose
}

ENTRY %main (x: f32[4,256]) -> (f32[1,256], bf16[256,4], pred[256]) {
  %x = f32[4,256]{1,0} parameter(0), metadata={op_name="f(x)"}
  %view = f32[4,256]{1,0} bitcast(%x)
  %sums = (f32[256]{0}, /*index=1*/bf16[4,256]{1,0}) fusion(%x, /*index=1*/%view), kind=kInput, calls=%fused_reduce
  %sum = f32[256]{0} get-tuple-element(%sums), index=0
  %low = bf16[4,256]{1,0} get-tuple-element(%sums), index=1
  %first = f32[1,256]{1,0} fusion(%low), kind=kLoop, calls=%fused_slice
  %called = bf16[256,4]{1,0} call(%low), to_apply=%graph
  %finite = pred[256]{0} is-finite(%sum)
  ROOT %all = (f32[1,256]{1,0}, bf16[256,4]{1,0}, pred[256]{0}) tuple(%first, %called, %finite)
}
"""  # noqa: E501 (as XLA writes it)


def test_each_kernel_s_distinct_operands_and_results():
    counted = {k.name: k.bytes for k in hlo_traffic.kernels(hlo_traffic.parse(PROGRAM))}
    assert counted == {
        "sums": 4096 + (1024 + 2048),  # x and its view are the same memory
        "first": 512 + 1024,  # one row of bf16, written as f32
        "turned": 2048 + 2048,  # inside a call
        "finite": 1024 + 256,
    }
    assert hlo_traffic.units(PROGRAM, 4096) == sum(counted.values()) / 4096


def test_layout_changes_are_those_of_the_size_of_x():
    (found,) = hlo_traffic.layout_changes(PROGRAM, 1024)
    assert found == "transpose bf16[256,4]{1,0} in turned"
    assert not hlo_traffic.layout_changes(PROGRAM, 1025)
    alone = PROGRAM.replace("is-finite(%sum)", "copy(%sum)").replace("pred[256]", "f32[256]")
    assert "copy f32[256]{0} in finite" in hlo_traffic.layout_changes(alone, 256)


def test_what_cannot_be_counted_is_refused():
    loop = PROGRAM.replace("is-finite(%sum)", "while(%sum), condition=%c, body=%b")
    with pytest.raises(NotImplementedError, match=r"%finite = while\(...\)"):
        hlo_traffic.units(loop, 1)
    with pytest.raises(ValueError, match="no ENTRY computation"):
        hlo_traffic.units("func.func @main() {\n}", 1)


def test_a_compiled_program():
    """By XLA for the device at hand: one pass that reads x and writes y."""
    x = jnp.ones((512, 128))
    text = jax.jit(lambda x: jnp.exp(x) * 2).lower(x).compile().as_text()
    assert text is not None
    assert hlo_traffic.units(text, x.nbytes) == 2
    assert not hlo_traffic.layout_changes(text, x.size)
    turned = jax.jit(lambda x: x.T + 0).lower(x).compile().as_text()
    assert turned is not None
    assert hlo_traffic.layout_changes(turned, x.size)


def fabricated(units: float, extra: str = ""):
    """A compiler that makes of everything a program of so many units."""

    def compile_(f, arrays, state, x, dy):
        columns = round(units * x.size * x.dtype.itemsize / 2)
        return (
            "ENTRY %main (p: u8[1]) -> u8[1] {\n"
            f"  %p = u8[{columns}]{{0}} parameter(0)\n"
            f"  %y = u8[{columns}]{{0}} negate(%p)\n"
            f"{extra if hasattr(arrays, 'norm') and arrays.norm is not None else ''}"
            "}\n"
        )

    return compile_


def problems(rows: list[Row]) -> set[tuple[str, str]]:
    return {(row.program.split(",")[0], row.verdict) for row in rows if row.problem}


def test_a_verdict_follows_its_numbers():
    few = gpu_compile.run(fabricated(9.0), quick=True)
    assert {row.implementation for row in few} == {NO_NORM, OURS}
    assert {row.direction for row in few} == {BOTH}
    assert not problems(few)
    assert sum(row.verdict == gpu_compile.HOLDS for row in few) == 4 + 2
    assert len(problems(gpu_compile.run(fabricated(9.2), quick=True))) == 1
    copies = "  %c = u8[9999999]{0} copy(%p)\n"
    between = problems(gpu_compile.run(fabricated(1.0, copies), quick=True))
    assert between == {("conv", "adds copies or transposes")}
    printed = gpu_compile.report(gpu_compile.run(fabricated(9.2), quick=True))
    assert printed.count("MORE THAN 9.1 UNITS") == 4


def test_the_results_say_what_they_are_of(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_compile, "PLUGIN", ())
    rows = gpu_compile.run(fabricated(9.0), quick=True)
    gpu_compile.save(tmp_path, rows, 1.0)
    written = json.loads((tmp_path / "gpu_compile.json").read_text())
    assert written["environment"]["device"] == "NVIDIA H200 (compiled for, not run on)"
    lines = (tmp_path / "gpu_compile.csv").read_text().splitlines()
    assert lines[1].startswith('"norm + relu, dense",eqx_norm,65536x256,bfloat16,')
    assert len(lines) == 1 + len(rows)


def test_without_the_plugin_it_says_what_to_do():
    without = "import sys; sys.modules['jax_cuda12_plugin'] = None\n"
    run = "from experiments import gpu_compile; sys.exit(gpu_compile.main([]))"
    result = subprocess.run(
        [sys.executable, "-c", without + run],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=dict(os.environ),
        check=False,
    )
    assert result.returncode == 2
    assert "make gpu-compile-check" in result.stderr
