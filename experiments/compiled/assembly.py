"""Reads off what becomes of this package's kernels: registers, spills, atomics, copies.

Pallas's Mosaic backend writes each kernel as PTX, of which CUDA's assembler makes code for one
GPU, with no GPU needed. To a folder that the environment names, jaxlib writes the PTX, what the
assembler says of it, and how much shared memory the kernel takes:

    eqx_norm_statistics_0.ptx
    eqx_norm_statistics_0.ptxas
    eqx_norm_statistics_1.resources.txt
"""

import re
import shutil
from pathlib import Path
from typing import NamedTuple

# What a core has, of an H200 and of a B200.
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
    """Returns the environment in which jaxlib, when it compiles first, writes to `folder`."""
    return {
        "MOSAIC_GPU_DUMP_TO": folder,
        "MOSAIC_GPU_DUMP_PTX": "1",
        "MOSAIC_GPU_DUMP_PTXAS": "1",
    }


def take(folder: str) -> list[Code]:
    """Returns this package's kernels in what was written, one of each name, and removes it.

    What the process has compiled before is not written again: merges, for example, that are
    the same for several dtypes.
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
    # In reverse, so that of kernels of one name the first is kept.
    for path in sorted(Path(folder).glob("*.resources.txt"), reverse=True):
        name = re.sub(r"_\d+\.resources\.txt$", "_mosaic_gpu_kernel", path.name)
        shared[name] = _only(r"smem_scratch_bytes=(\d+)", path.read_text())
    return shared


def _code(name: str, path: Path, shared: int) -> Code:
    ptx, said = path.read_text(), path.with_suffix(".ptxas").read_text()
    return Code(
        name,
        warps=int(_only(r"\.(?:reqntid|maxntid) (\d+)", ptx)) // _WARP,
        registers=int(_only(r"Used (\d+) registers", said)),
        spilled_bytes=int(_only(r"(\d+) bytes spill stores", said)),
        shared_bytes=shared,
        atomics=len(re.findall(r"\b(?:atom|red)\.", ptx)),
        copies=len(re.findall(r"\bcp\.async\.bulk\.tensor\S*\.global\.", ptx)),
        unfenced=unfenced(ptx),
    )


def unfenced(ptx: str) -> bool:
    """Returns whether a copy follows on a load of shared memory, no fence and barrier between.

    In the order of the text, as in the loop, whose body is one piece of it.
    """
    kinds = r"(ld\.shared|fence\.proxy\.async|bar\.sync|cp\.async\.bulk\.tensor)"
    # l(oad), f(ence), b(arrier), c(opy)
    order = "".join(kind[0] for kind in re.findall(kinds, ptx))
    return re.search("l[^lfc]*(f[^lbc]*)?c", order) is not None


def _only(pattern: str, text: str) -> str:
    (found,) = set(re.findall(pattern, text))
    return found
