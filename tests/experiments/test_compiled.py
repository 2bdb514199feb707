"""Tests what is read off a compiled program and a kernel's code, and the claims on it."""

import jax
import jax.numpy as jnp
import pytest

from experiments.compiled import assembly, recipe, traffic
from experiments.compiled.__main__ import EXPERIMENT
from experiments.compiled.cases import cases
from experiments.compiled.claims import CLAIMS, Measured
from experiments.compiled.devices import SHARD_MAP, Sent
from experiments.compiled.measured import measure
from experiments.compiled.memory import Needed
from experiments.compiled.recipe import ATOMIC, NO_SCATTER, OURS, SORTED, Step
from experiments.lab import claims
from experiments.lab.passes import NO_NORM
from experiments.lab.peers import names

# x and y have 4,096 bytes (2,048 as bf16). The GPU backend writes programs like this one.
PROGRAM = """\
HloModule jit_f, is_scheduled=true, entry_computation_layout={(f32[4,256]{1,0})->f32[256]{0}}

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


def test_what_a_program_moves():
    found = traffic.launches(PROGRAM)
    assert {launch.name: launch.bytes for launch in found} == {
        "sums": 4096 + (1024 + 2048),  # x and its view are the same memory
        "first": 512 + 1024,  # one row of bf16, written as f32
        "turned": 2048 + 2048,  # inside a call
        "finite": 1024 + 256,
    }
    assert traffic.layout_changes(found, 1024) == 1
    assert traffic.layout_changes(found, 1025) == 0
    loop = PROGRAM.replace("is-finite(%sum)", "while(%sum), condition=%c, body=%b")
    with pytest.raises(NotImplementedError, match=r"%finite = while\(...\)"):
        traffic.launches(loop)


def test_a_compiled_program():
    """By XLA for the device at hand: one pass that reads x and writes y."""
    x = jnp.ones((512, 128))

    def found(f):
        return traffic.launches(jax.jit(f).lower(x).compile().as_text() or "")

    once = found(lambda x: jnp.exp(x) * 2)
    assert sum(launch.bytes for launch in once) == 2 * x.nbytes
    assert not traffic.layout_changes(once, x.size)
    assert traffic.layout_changes(found(lambda x: x.T + 0), x.size)


GOOD = assembly.Code("eqx_norm_statistics", 4, 56, 0, 512, 0, 1, unfenced=False)


@pytest.mark.parametrize(
    ("registers", "warps", "shared", "occupancy"),
    [(32, 4, 512, 64), (33, 4, 512, 48), (128, 4, 512, 16), (32, 1, 0, 32), (32, 4, 2**16, 8)],
)
def test_occupancy(registers, warps, shared, occupancy):
    """As CUDA's calculator has it."""
    code = GOOD._replace(registers=registers, warps=warps, shared_bytes=shared)
    assert code.occupancy(2**17) == occupancy / 64


STEP = Step("a scatter", ATOMIC, SORTED, same=False)
SENT = Sent(SHARD_MAP, names.OURS, "float32", False, "", sends=2, largest=64)


# Without, with, and Equinox's.
NEEDED = [
    Needed(16, names.OURS, "float32", False, 100, 100, 100, 12.0),
    Needed(16, names.OURS, "float32", True, 60, 60, 114, 12.0),
    Needed(16, names.EQUINOX_BATCH, "float32", False, 172, 172, 100, 10.0),
]


def needing(**changes):
    without, with_, theirs = NEEDED
    return {"needed": [without, with_._replace(**changes), theirs]}


def failing(extra=0.0, by="negate", step=STEP, sent=SENT, needed=NEEDED, **changes):
    """Returns the numbers of the claims that do not hold where every program is one kernel.

    The kernel moves x once; beside it, where there is a norm, `by` writes `extra` times x.
    """
    kernel = GOOD._replace(**changes)
    chosen = cases("H200", quick=True)
    remaining = iter(chosen)

    def compile_(f, *arguments):
        case = next(remaining)
        size = case.x.size * case.x.dtype.itemsize
        call = f'custom_call_target="mosaic_gpu_v2", op_name="f/{kernel.name}/mpmd_map"'
        written = 0 if case.implementation == NO_NORM else round(extra * size)
        return (
            "ENTRY %main (p: u8[1]) -> u8[1] {\n"
            f"  %p = u8[{size}]{{0}} parameter(0)\n"
            f"  %k = u8[0]{{0}} custom-call(%p), {call}\n"
            f"  %z = u8[{written}]{{0}} {by}(%k)\n"
            "}\n"
        )

    programs, kernels = measure(chosen, compile_, lambda: [kernel])
    assert all(row.units == 1 for row in kernels)
    assert all(row.launches == 2 for row in programs)
    verdicts = claims.judge(CLAIMS, Measured(programs, kernels, [step], [sent], needed))
    return {int(v.claim.partition(".")[0]) for v in verdicts if v.holds is False}


@pytest.mark.parametrize(
    ("changes", "numbers"),
    [
        ({}, set()),
        ({"extra": 2.1}, {5}),
        ({"extra": 6.3}, {3, 5}),
        ({"extra": 7.3}, {1, 3, 5}),
        ({"extra": 8.3}, {1, 3, 4, 5}),
        ({"extra": 1, "by": "copy"}, {2, 6}),
        ({"spilled_bytes": 8}, {7}),
        ({"atomics": 1}, {8}),
        ({"copies": 0}, {9}),
        ({"unfenced": True}, {10}),
        ({"step": STEP._replace(recipe=ATOMIC)}, {11}),
        ({"step": STEP._replace(program=min(OURS))}, {12}),
        ({"sent": SENT._replace(largest=2049)}, {13}),
        ({"sent": SENT._replace(sends=3)}, {14}),
        (needing(kept=61), {15}),
        (needing(temporaries=61), {16}),
        (needing(moved=116), {17}),
        ({"needed": [NEEDED[0]._replace(seconds=12.1), *NEEDED[1:]]}, {18}),
    ],
    ids=str,
)
def test_each_claim_can_fail(changes, numbers):
    assert failing(**changes) == numbers


def test_how_a_program_adds():
    scatter = "ENTRY %main {\n  %y = f32[8] scatter(%x, %i, %v)\n}\n"
    sorted_ = scatter.replace("  %y", "  %i = s32[8] sort(%j)\n  %y")
    one = "HloModule a\n  %y = f32[8] negate(%x), metadata={a}"
    usual = {"a scatter": scatter, "another": one}
    again = {"a scatter": sorted_, "another": one.replace("a", "b", 1)}
    steps = [STEP, Step("another", NO_SCATTER, NO_SCATTER, same=True)]
    assert recipe.compare(usual, again) == steps


def test_without_the_plugin_it_says_what_to_do(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit) as exit_:
        EXPERIMENT.main(["--out", str(tmp_path)])
    assert exit_.value.code == 2
    assert "make gpu-compile-check" in capsys.readouterr().err


def test_copies_before_all_have_read():
    """Fails if what experiments/compiled reads off the code would miss a missing fence."""
    read, fence = "ld.shared.v4.b32 {%r1, %r2}, [%rd1];\n", "fence.proxy.async.shared::cta;\n"
    barrier, copy = "bar.sync %r5, 128;\n", "cp.async.bulk.tensor.4d.shared::cta [%r6];\n"
    assert not assembly.unfenced((read + fence + barrier + copy) * 2)
    for between in (fence, barrier, barrier + fence):
        assert assembly.unfenced(read + between + copy)
