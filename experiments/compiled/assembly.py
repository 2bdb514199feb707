"""Reads off what becomes of this package's kernels: registers, spills, atomics, loads.

Pallas's backends write each kernel as PTX, of which CUDA's assembler makes code for one GPU,
with no GPU needed:

    .visible .entry eqx_norm_statistics( ... )
    .reqntid 128
        ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];

A kernel of 128 threads that loads 4 x 32 bits at a time. Both write it to a folder, where the
environment tells them to.

XLA has Triton's:               jaxlib has Mosaic's, and what `ptxas` and it say of them:

    *.ptx                           eqx_norm_statistics_0.ptx
    *thunk_sequence.txt             eqx_norm_statistics_0.ptxas
      (the shared memory)           eqx_norm_statistics_0.resources.txt
"""

import collections
import importlib.util
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
_XLA, _MOSAIC = "xla", "mosaic"


class Code(NamedTuple):
    """Holds one kernel's code, for one GPU."""

    name: str
    warps: int
    registers: int
    spilled_bytes: int
    shared_bytes: int
    atomics: int
    loads: dict[int, int]  # how many instructions load so many bytes of global memory
    copies: int = 0  # instructions that have a chunk copied ahead to shared memory
    unfenced: bool = False  # where it is copied to may be written before all have read it

    def occupancy(self, shared_memory: int) -> float:
        """Returns the share of a core's warps that fit into so much shared memory."""
        warp = -(-self.registers * _WARP // _GRANULE) * _GRANULE
        fit = [_PROGRAMS, _WARPS // self.warps, _REGISTERS // warp // self.warps]
        if self.shared_bytes:
            fit.append(shared_memory // self.shared_bytes)
        return min(fit) * self.warps / _WARPS


def settings(folder: Path) -> dict[str, str]:
    """Returns the environment in which XLA and jaxlib write to `folder`.

    They read it when jax compiles for the first time.
    """
    for name in (_XLA, _MOSAIC):
        (folder / name).mkdir()
    return {
        # And nothing that would take long.
        "XLA_FLAGS": f"--xla_dump_to={folder / _XLA} --xla_dump_hlo_as_text=true "
        "--xla_dump_emitter_re=ptx",
        "MOSAIC_GPU_DUMP_TO": str(folder / _MOSAIC),
        "MOSAIC_GPU_DUMP_PTX": "1",
        "MOSAIC_GPU_DUMP_PTXAS": "1",
    }


def take(folder: Path) -> list[Code]:
    """Returns this package's kernels in what was written, one of each name, and removes it.

    Mosaic's that the process has compiled before are not written again: merges, for example,
    that are the same for several dtypes.
    """
    found = sorted([*_triton(folder / _XLA), *_mosaic(folder / _MOSAIC)], key=lambda c: c.name)
    for written in folder.iterdir():
        shutil.rmtree(written)
        written.mkdir()
    return found


def _triton(folder: Path) -> list[Code]:
    shared = {}
    for path in folder.glob("*thunk_sequence.txt"):
        shared |= dict(
            re.findall(r"(\w+) grid: .*shared_memory: (\d+) bytes", path.read_text())
        )
    codes = {}
    for path in sorted(folder.glob("*.ptx")):
        ptx = path.read_text()
        for name in re.findall(rf"\.entry ({PREFIX}\w+)", ptx):
            # Several kernels of a name are numbered: they are the same but for their sizes.
            base = re.sub(r"__\d+$", "", name)
            if base not in codes:
                codes[base] = _code(base, ptx, _ptxas(path, ptx), int(shared[name]))
    return list(codes.values())


def _mosaic(folder: Path) -> list[Code]:
    def texts(suffix: str) -> dict[str, str]:
        """Returns them by name; of several kernels of one name that of the first."""
        paths = sorted(folder.glob(f"{PREFIX}*{suffix}"), reverse=True)
        # The numbers of a kernel's assembly and of its resources may be two: they count what is
        # compiled, and what is lowered.
        return {re.sub(rf"_\d+{re.escape(suffix)}$", "", p.name): p.read_text() for p in paths}

    said, resources = texts(".ptxas"), texts(".resources.txt")
    codes = []
    for name, ptx in texts(".ptx").items():
        shared = int(_only(r"smem_scratch_bytes=(\d+)", resources[name]))
        base = _only(r"\.entry (\w+)_mosaic_gpu_kernel", ptx)
        copies = len(re.findall(r"\bcp\.async\.bulk\.tensor\S*\.global\.", ptx))
        code = _code(base, ptx, said[name], shared)
        codes.append(code._replace(copies=copies, unfenced=unfenced(ptx)))
    return codes


def _code(name: str, ptx: str, said: str, shared: int) -> Code:
    return Code(
        name,
        warps=int(_only(r"\.(?:reqntid|maxntid) (\d+)", ptx)) // _WARP,
        registers=int(_only(r"Used (\d+) registers", said)),
        spilled_bytes=int(_only(r"(\d+) bytes spill stores", said)),
        shared_bytes=shared,
        atomics=len(re.findall(r"\b(?:atom|red)\.", ptx)),
        loads=loads(ptx),
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
    done = ""  # since the last load
    for kind in re.findall(kinds, ptx):
        match kind, done:
            case "ld.shared", _:
                done = "loaded"
            case "fence.proxy.async", "loaded":
                done = "fenced"
            case "bar.sync", "fenced":
                done = ""  # all have read it
            case "cp.async.bulk.tensor", "loaded" | "fenced":
                return True
    return False


def _only(pattern: str, text: str) -> str:
    (found,) = set(re.findall(pattern, text))
    return found


def _ptxas(path: Path, ptx: str) -> str:
    """Returns what CUDA's assembler, which comes with jax's plugin, says of a kernel."""
    spec = importlib.util.find_spec("nvidia.cuda_nvcc")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    assembler = Path(spec.submodule_search_locations[0]) / "bin" / "ptxas"
    to = [assembler, "-v", "-arch", _only(r"\.target (\w+)", ptx), "-o", "/dev/null", path]
    return subprocess.run(to, capture_output=True, text=True, check=True).stderr
