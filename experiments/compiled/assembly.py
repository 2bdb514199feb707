"""Reads off what becomes of this package's kernels: registers, spills, atomics, loads.

Pallas's backends write each kernel as PTX, of which CUDA's assembler makes code for one GPU,
with no GPU needed:

    .visible .entry eqx_norm_statistics( ... )
    .reqntid 128
        ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];

A kernel of 128 threads that loads 4 x 32 bits at a time. To a folder that the environment
names, XLA writes Triton's kernels, and jaxlib Mosaic's with what its assembler says of them;
and to another file of each how much shared memory they take:

    *.ptx                    eqx_norm_statistics_0.ptx, eqx_norm_statistics_0.ptxas
    *thunk_sequence.txt      eqx_norm_statistics_1.resources.txt
"""

import collections
import importlib.resources
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

# What a core has, from the A100 to the B200.
_REGISTERS, _WARPS, _PROGRAMS, _WARP = 65536, 64, 32, 32
# Registers are given to a warp in so many.
_GRANULE = 256

# What the names of this package's kernels start with.
PREFIX = "eqx_norm_"


class Code(NamedTuple):
    """Holds one kernel's code, for one GPU."""

    name: str
    warps: int
    registers: int
    spilled_bytes: int
    shared_bytes: int
    atomics: int
    loads: dict[int, int]  # how many instructions load so many bytes of global memory
    copies: int  # instructions that have a chunk copied ahead to shared memory
    unfenced: bool  # where it is copied to may be written before all have read it

    def occupancy(self, shared_memory: int) -> float:
        """Returns the share of a core's warps that fit into so much shared memory."""
        warp = -(-self.registers * _WARP // _GRANULE) * _GRANULE
        fit = [_PROGRAMS, _WARPS // self.warps, _REGISTERS // warp // self.warps]
        if self.shared_bytes:
            fit.append(shared_memory // self.shared_bytes)
        return min(fit) * self.warps / _WARPS


def settings(folder: str) -> dict[str, str]:
    """Returns the environment in which XLA and jaxlib write to `folder`.

    They read it when jax compiles for the first time.
    """
    return {
        # And nothing that would take long.
        "XLA_FLAGS": f"--xla_dump_to={folder} --xla_dump_hlo_as_text=true "
        "--xla_dump_emitter_re=ptx",
        "MOSAIC_GPU_DUMP_TO": folder,
        "MOSAIC_GPU_DUMP_PTX": "1",
        "MOSAIC_GPU_DUMP_PTXAS": "1",
    }


def take(folder: str) -> list[Code]:
    """Returns this package's kernels in what was written, one of each name, and removes it.

    Mosaic's that the process has compiled before are not written again: merges, for example,
    that are the same for several dtypes.
    """
    shared = _shared_memory(folder)
    codes: dict[str, Code] = {}
    for path in sorted(Path(folder).glob("*.ptx")):
        for entry in re.findall(rf"\.entry ({PREFIX}\w+)", path.read_text()):
            # Several kernels of a name are numbered: they are the same but for their sizes.
            name = re.sub(r"(_mosaic_gpu_kernel|__\d+)$", "", entry)
            if name not in codes:
                codes[name] = _code(name, path, int(shared[entry]))
    shutil.rmtree(folder)
    Path(folder).mkdir()
    return [codes[name] for name in sorted(codes)]


def _shared_memory(folder: str) -> dict[str, str]:
    """Returns how many bytes of shared memory a kernel takes, by its name in the assembly."""
    shared: dict[str, str] = {}
    for path in Path(folder).glob("*thunk_sequence.txt"):
        found = re.findall(r"(\w+) grid: .*shared_memory: (\d+) bytes", path.read_text())
        shared |= dict(found)
    # In reverse, so that of Mosaic's kernels of one name the first is kept.
    for path in sorted(Path(folder).glob("*.resources.txt"), reverse=True):
        name = re.sub(r"_\d+\.resources\.txt$", "_mosaic_gpu_kernel", path.name)
        shared[name] = _only(r"smem_scratch_bytes=(\d+)", path.read_text())
    return shared


def _code(name: str, path: Path, shared: int) -> Code:
    ptx, by_mosaic = path.read_text(), path.with_suffix(".ptxas")
    said = by_mosaic.read_text() if by_mosaic.exists() else _ptxas(path, ptx)
    return Code(
        name,
        warps=int(_only(r"\.(?:reqntid|maxntid) (\d+)", ptx)) // _WARP,
        registers=int(_only(r"Used (\d+) registers", said)),
        spilled_bytes=int(_only(r"(\d+) bytes spill stores", said)),
        shared_bytes=shared,
        atomics=len(re.findall(r"\b(?:atom|red)\.", ptx)),
        loads=loads(ptx),
        copies=len(re.findall(r"\bcp\.async\.bulk\.tensor\S*\.global\.", ptx)),
        unfenced=unfenced(ptx),
    )


def loads(ptx: str) -> dict[int, int]:
    """Returns how many instructions load so many bytes of the memory that all cores share."""
    found = re.findall(r"\bld\.global(?:\.\w+(?:::\w+)*)*?(?:\.v(\d))?\.[a-z](\d+)\b", ptx)
    return dict(collections.Counter(int(n or 1) * int(bits) // 8 for n, bits in found))


def unfenced(ptx: str) -> bool:
    """Returns whether a copy follows on a load of shared memory, no fence and barrier between.

    In the order of the text, as in the loop, whose body is one piece of it.
    """
    kinds = r"(ld\.shared|fence\.proxy\.async|bar\.sync|cp\.async\.bulk\.tensor)"
    # l(oad), f(ence), b(arrier), c(opy)
    order = "".join(kind[0] for kind in re.findall(kinds, ptx))
    return re.search("l[^lfc]*(f[^lbc]*)?c", order) is not None


def _ptxas(path: Path, ptx: str) -> str:
    """Returns what CUDA's assembler, which comes with jax's plugin, says of a kernel."""
    assembler = str(importlib.resources.files("nvidia.cuda_nvcc") / "bin" / "ptxas")
    arch = _only(r"\.target (\w+)", ptx)
    command = [assembler, "-v", "-arch", arch, "-o", "/dev/null", path]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def _only(pattern: str, text: str) -> str:
    (found,) = set(re.findall(pattern, text))
    return found
