"""Tests what is read off a compiled program and a kernel's code, and the claims on it."""

import jax
import jax.numpy as jnp
import pytest

from experiments.compiled import assembly, compiler, recipe, traffic
from experiments.compiled.__main__ import EXPERIMENT, _units
from experiments.compiled.assembly import Code
from experiments.compiled.cases import DENSE, cases
from experiments.compiled.claims import CLAIMS, Measured
from experiments.compiled.measured import Program, measure
from experiments.compiled.programs import BATCH_NORM, BETWEEN
from experiments.compiled.recipe import ATOMIC, OURS, Step
from experiments.lab import claims
from experiments.lab.passes import BOTH
from experiments.lab.peers import names

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
    assert {kernel.name: kernel.bytes for kernel in traffic.kernels(PROGRAM)} == {
        "sums": 4096 + (1024 + 2048),  # x and its view are the same memory
        "first": 512 + 1024,  # one row of bf16, written as f32
        "turned": 2048 + 2048,  # inside a call
        "finite": 1024 + 256,
    }


def test_layout_changes_are_those_of_the_size_of_x():
    found = traffic.kernels(PROGRAM)
    assert {kernel.name: kernel.reordered for kernel in found}["turned"] == (1024,)
    assert traffic.layout_changes(found, 1024) == 1
    assert traffic.layout_changes(found, 1025) == 0
    alone = PROGRAM.replace("is-finite(%sum)", "copy(%sum)").replace("pred[256]", "f32[256]")
    assert traffic.layout_changes(traffic.kernels(alone), 256) == 2


def test_what_cannot_be_counted_is_refused():
    loop = PROGRAM.replace("is-finite(%sum)", "while(%sum), condition=%c, body=%b")
    with pytest.raises(NotImplementedError, match=r"%finite = while\(...\)"):
        traffic.kernels(loop)
    with pytest.raises(ValueError, match="no ENTRY computation"):
        traffic.kernels("func.func @main() {\n}")


def test_a_compiled_program():
    """By XLA for the device at hand: one pass that reads x and writes y."""
    x = jnp.ones((512, 128))

    def found(f):
        return traffic.kernels(jax.jit(f).lower(x).compile().as_text() or "")

    once = found(lambda x: jnp.exp(x) * 2)
    assert sum(kernel.bytes for kernel in once) == 2 * x.nbytes
    assert not traffic.layout_changes(once, x.size)
    assert traffic.layout_changes(found(lambda x: x.T + 0), x.size)


PTX = """
    @%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
    ld.global.L1::evict_last.v2.b32 { %r1, %r2 }, [ %rd2 ];
    ld.global.nc.b16 %rs1, [%rd3];
    ld.global.v8.b16 { %rs1 }, [%rd3];
    ld.shared.v4.b32 { %r1, %r2, %r3, %r4 }, [ %r5 ];
"""


def code(**changes):
    good = Code("eqx_norm_statistics", 4, 56, 0, 512, 0, {16: 4}, copies=1)
    return good._replace(**changes)


def test_loads_of_each_width():
    assert assembly.loads(PTX) == {16: 2, 8: 1, 2: 1}


def test_occupancy():
    """As CUDA's calculator has it."""
    assert code(registers=32).occupancy(2**17) == 1
    assert code(registers=33).occupancy(2**17) == 48 / 64
    assert code(registers=128).occupancy(2**17) == 16 / 64
    assert code(registers=32, warps=1).occupancy(2**17) == 32 / 64
    assert code(registers=32, shared_bytes=2**16).occupancy(2**17) == 8 / 64


def does_not_hold(extra=0.0, **changes):
    """Returns the numbers of the claims that fail, where every program is one kernel.

    The kernel moves x once, an operation beside it writes `extra` times x.
    """
    kernel = code(**changes)
    remaining = iter(cases("H200", quick=True))

    def compile_(f, *arguments):
        case = next(remaining)
        size = case.x.size * case.x.dtype.itemsize
        call = f'custom_call_target="__gpu$xla.gpu.triton", name = "{kernel.name}"'
        return (
            "ENTRY %main (p: u8[1]) -> u8[1] {\n"
            f"  %p = u8[{size}]{{0}} parameter(0)\n"
            f"  %k = u8[0]{{0}} custom-call(%p), {call}\n"
            f"  %z = u8[{round(extra * size)}]{{0}} negate(%k)\n"
            "}\n"
        )

    programs, kernels = measure(cases("H200", quick=True), compile_, lambda: [kernel])
    assert all(row.units == 1 for row in kernels)
    assert all(row.launches == 2 for row in programs)
    verdicts = claims.judge(CLAIMS, Measured(programs, kernels, []))
    return {int(v.claim.partition(".")[0]) for v in verdicts if v.holds is False}


@pytest.mark.parametrize(
    ("changes", "numbers"),
    [
        ({}, set()),
        ({"spilled_bytes": 8}, {5}),
        ({"atomics": 1}, {6}),
        ({"loads": {16: 3}}, {7}),
        ({"loads": {16: 4, 2: 8}}, {7}),
        ({"copies": 0}, {8}),
        ({"unfenced": True}, {9}),
        ({"extra": 8.05}, {3}),
        ({"extra": 8.2}, {1, 3}),
    ],
    ids=str,
)
def test_what_is_wrong_with_a_kernel_is_seen(changes, numbers):
    assert does_not_hold(**changes) == numbers


SCATTER = "ENTRY %main {\n  %y = f32[8] scatter(%x, %i, %v)\n}\n"
SORTED = SCATTER.replace("  %y", "  %i = s32[8] sort(%j)\n  %y")


def test_how_a_program_adds():
    (ours, _) = OURS
    usual = {"a scatter": SCATTER, ours: "HloModule a\n  %y = f32[8] negate(%x), metadata={a}"}
    steps = recipe.compare(usual, {"a scatter": SORTED, ours: usual[ours].replace("a", "b", 1)})
    assert steps == [
        Step("a scatter", ATOMIC, "sorted first", False),
        Step(ours, "no scatter", "no scatter", True),
    ]


def test_other_gpus_differ_in_what_is_said_of_them():
    memory = [compiler.shared_memory(device) / 1024 for device in compiler.DEVICES]
    assert memory == [164, 228, 228]


def test_without_the_plugin_it_says_what_to_do(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit) as exit_:
        EXPERIMENT.main(["--out", str(tmp_path)])
    assert exit_.value.code == 2
    assert "make gpu-compile-check" in capsys.readouterr().err


def test_what_the_readme_says_is_of_one_program():
    """Layers are compared on the same arrays, whatever the order of the rows."""
    row = Program("H200", BATCH_NORM, DENSE, "bfloat16", BOTH, names.OURS_TRITON, 7.0, 1, 0)
    others = [
        row._replace(program=BETWEEN, units=29.2),
        row._replace(device="A100", units=7.1),
        row._replace(dtype="float32", units=7.2),
    ]
    assert "7.0 times" in _units([*others, row], names.OURS_TRITON)
    assert _units(others, names.OURS_TRITON) == ""
