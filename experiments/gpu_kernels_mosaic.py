"""What jaxlib makes of a Mosaic kernel: registers, spills, copies ahead, fences.

It compiles such kernels itself, and writes what it makes where it is told to:

    eqx_norm_statistics_0.ptx             the assembly
    eqx_norm_statistics_0.ptxas           what the assembler says of it
    eqx_norm_statistics_0.resources.txt   the shared memory

Numbers count what is compiled, and what is lowered.
"""

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from . import gpu_kernels_code
from .gpu_kernels_code import PREFIX, Code


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """jaxlib also calls a disassembler, and complains at length that there is none: what is
    written to stderr is shown only if there is an exception."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as written:
        os.dup2(written.fileno(), 2)
        try:
            yield
        except BaseException:
            written.seek(0)
            os.write(kept, written.read())
            raise
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def read(folder: Path) -> list[Code]:
    """The kernels in what jaxlib has written. A kernel that the process has compiled before is
    not written again: merges, for example, that are the same for several dtypes."""
    folder = folder / gpu_kernels_code.MOSAIC

    def texts(suffix: str) -> dict[str, str]:
        """By name; of several kernels of one name that of the first."""
        paths = sorted(folder.glob(f"{PREFIX}*{suffix}"), reverse=True)
        # What is not compiled again is counted again all the same: the numbers of a kernel's
        # assembly and of its resources may be two.
        names = (re.sub(rf"_\d+{re.escape(suffix)}$", "", path.name) for path in paths)
        return {
            name: path.read_text(encoding="utf-8")
            for name, path in zip(names, paths, strict=True)
        }

    assembled, resources = texts(".ptxas"), texts(".resources.txt")
    return [
        _code(text, assembled[name], resources[name]) for name, text in texts(".ptx").items()
    ]


def _code(ptx: str, assembled: str, resources: str) -> Code:
    return Code(
        gpu_kernels_code.only(r"\.entry (\w+)_mosaic_gpu_kernel", ptx),
        int(gpu_kernels_code.only(r"\.maxntid (\d+)", ptx)) // 32,
        int(gpu_kernels_code.only(r"Used (\d+) registers", assembled)),
        int(gpu_kernels_code.only(r"(\d+) bytes spill stores", assembled)),
        int(gpu_kernels_code.only(r"smem_scratch_bytes=(\d+)", resources)),
        len(re.findall(r"\b(?:atom|red)\.", ptx)),
        gpu_kernels_code.loads(ptx),
        len(re.findall(r"\bcp\.async\.bulk\.tensor\S*\.global\.", ptx)),
        unfenced(ptx),
    )


def unfenced(ptx: str) -> bool:
    """Whether a copy follows on a load of shared memory with no fence and barrier between.

    In the order of the text, as in the loop, whose body is one piece of it.
    """
    kinds = r"(ld\.shared|fence\.proxy\.async|bar\.sync|cp\.async\.bulk\.tensor)"
    fence, barrier, loaded = False, False, False
    for kind in re.findall(kinds, ptx):
        match kind:
            case "ld.shared":
                fence, barrier, loaded = False, False, True
            case "fence.proxy.async":
                fence = True
            case "bar.sync":
                barrier = fence
            case _ if loaded and not barrier:
                return True
    return False
