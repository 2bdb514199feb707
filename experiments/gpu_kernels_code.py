"""What CUDA's assembler makes of a kernel: registers, spills, width of loads.

XLA writes each kernel as PTX, which `ptxas` assembles for one GPU, with no GPU needed:

    .visible .entry eqx_norm_statistics( ... )
    .reqntid 128
        ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];

A kernel of 128 threads that loads 4 x 32 bits at a time, in 56 registers for each thread.
"""

import collections
import importlib.util
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

# Of a core, from the A100 to the B200.
_REGISTERS, _WARPS, _PROGRAMS, _WARP = 65536, 64, 32, 32
# Registers are given to a warp in so many.
_GRANULE = 256

# What the names of this package's kernels start with.
PREFIX = "eqx_norm_"
# Where XLA and jaxlib write what they make.
XLA, MOSAIC = "xla", "mosaic"


def settings(folder: Path) -> dict[str, str]:
    """The environment in which XLA writes the PTX that it makes to a folder in `folder`, and
    jaxlib that of Mosaic's kernels to another. Read when jax compiles for the first time."""
    for name in (XLA, MOSAIC):
        (folder / name).mkdir()
    return {
        # And nothing that would take long.
        "XLA_FLAGS": f"--xla_dump_to={folder / XLA} --xla_dump_hlo_as_text=true "
        "--xla_dump_emitter_re=ptx",
        "MOSAIC_GPU_DUMP_TO": str(folder / MOSAIC),
        "MOSAIC_GPU_DUMP_PTX": "1",
        "MOSAIC_GPU_DUMP_PTXAS": "1",
    }


class Code(NamedTuple):
    """One kernel, for one GPU."""

    name: str
    warps: int
    registers: int
    spilled_bytes: int
    shared_bytes: int
    atomics: int
    loads: dict[int, int]  # how many of so many bytes
    copies: int = 0  # instructions that have a chunk copied ahead to shared memory
    unfenced: bool = False  # where it is copied to may be written before all have read it

    def occupancy(self, shared_memory: int) -> float:
        """The share of a core's warps that fit, if it has so many bytes of shared memory."""
        warp = -(-self.registers * _WARP // _GRANULE) * _GRANULE
        fit = [_PROGRAMS, _WARPS // self.warps, _REGISTERS // warp // self.warps]
        if self.shared_bytes:
            fit.append(shared_memory // self.shared_bytes)
        return min(fit) * self.warps / _WARPS


def read(folder: Path) -> list[Code]:
    """This package's kernels in what XLA has written, one of each name."""
    folder = folder / XLA
    shared = {}
    for path in folder.glob("*thunk_sequence.txt"):
        text = path.read_text(encoding="utf-8")
        shared |= dict(re.findall(r"(\w+) grid: .*shared_memory: (\d+) bytes", text))
    codes = {}
    for path in sorted(folder.glob("*.ptx")):
        text = path.read_text(encoding="utf-8")
        name = only(r"\.entry (\w+)", text)
        if name.startswith(PREFIX):
            # Several kernels of a name are numbered: they are the same but for their sizes.
            base = re.sub(r"__\d+$", "", name)
            codes.setdefault(base, _code(path, text, base, int(shared[name])))
    return list(codes.values())


def _code(path: Path, text: str, name: str, shared: int) -> Code:
    assembled = subprocess.run(
        [_ptxas(), "-v", "-arch", only(r"\.target (\w+)", text), "-o", "/dev/null", path],
        capture_output=True,
        text=True,
        check=True,
    ).stderr
    return Code(
        name,
        int(only(r"\.reqntid (\d+)", text)) // _WARP,
        int(only(r"Used (\d+) registers", assembled)),
        int(only(r"(\d+) bytes spill stores", assembled)),
        shared,
        len(re.findall(r"\b(?:atom|red)\.", text)),
        loads(text),
    )


def loads(text: str) -> dict[int, int]:
    """How many instructions load so many bytes of the memory that all cores share."""
    found = re.findall(r"\bld\.global(?:\.\w+(?:::\w+)*)*?(?:\.v(\d))?\.[a-z](\d+)\b", text)
    return dict(collections.Counter(int(n or 1) * int(bits) // 8 for n, bits in found))


def only(pattern: str, text: str) -> str:
    (found,) = set(re.findall(pattern, text))
    return found


def _ptxas() -> Path:
    spec = importlib.util.find_spec("nvidia.cuda_nvcc")
    assert spec is not None, "jax's CUDA plugin comes with it"
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]) / "bin" / "ptxas"
