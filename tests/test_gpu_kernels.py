"""What is read off the kernels that are compiled for a GPU that is not there."""

import subprocess
import sys
from pathlib import Path

import jax

from experiments import gpu_kernels, gpu_kernels_code, gpu_kernels_tables
from experiments.gpu_kernels_code import Code

ROOT = Path(__file__).parents[1]

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
    assert gpu_kernels_code.loads(PTX) == {16: 2, 8: 1, 2: 1}


def test_occupancy():
    """As CUDA's calculator has it."""
    assert code(registers=32).occupancy(2**17) == 1
    assert code(registers=33).occupancy(2**17) == 48 / 64
    assert code(registers=128).occupancy(2**17) == 16 / 64
    assert code(registers=32, warps=1).occupancy(2**17) == 32 / 64
    assert code(registers=32, shared_bytes=2**16).occupancy(2**17) == 8 / 64


def fabricated(kernel, extra=0):
    """A compiler that makes of everything one kernel that moves x once, and so much more."""

    def compile_(f, x, *arrays):
        size = x.size * x.dtype.itemsize
        call = f'custom_call_target="__gpu$xla.gpu.triton", name = "{kernel.name}"'
        text = (
            "ENTRY %main (p: u8[1]) -> u8[1] {\n"
            f"  %p = u8[{size}]{{0}} parameter(0)\n"
            f"  %k = u8[0]{{0}} custom-call(%p), {call}\n"
            f"  %y = u8[{extra * size}]{{0}} copy(%k)\n"
            "}\n"
        )
        return text, [kernel]

    return compile_


def wrong(kernel, extra=0):
    rows, programs = gpu_kernels.run(fabricated(kernel, extra), "H200", quick=True)
    assert all(row.units == 1 for row in rows)
    return {
        claim for claim, where in gpu_kernels_tables.claims(rows, programs).items() if where
    }


def test_a_claim_follows_its_numbers():
    assert not wrong(code())
    assert wrong(code(spilled_bytes=8)) == {"nothing is spilled"}
    assert wrong(code(atomics=1)) == {"nothing is added atomically"}
    wide = {"Triton's kernels load x and g 16 bytes at a time"}
    assert wrong(code(loads={16: 3})) == wide
    assert wrong(code(loads={16: 4, 2: 8})) == wide
    assert wrong(code(unfenced=True)) == {"nothing is copied to where it is still read"}
    has_mosaic = jax.__version_info__ >= (0, 12)
    ahead = {"Mosaic's kernels have x and g copied ahead"}
    assert wrong(code(copies=0)) == (ahead if has_mosaic else set())
    (much,) = wrong(code(), extra=5)
    assert much.startswith("at most 3.05 units forward")


def test_without_the_plugin_it_says_what_to_do():
    without = "import sys; sys.modules['jax_cuda12_plugin'] = None\n"
    run = "from experiments import gpu_kernels; sys.exit(gpu_kernels.main([]))"
    result = subprocess.run(
        [sys.executable, "-c", without + run],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert "make gpu-compile-check" in result.stderr
