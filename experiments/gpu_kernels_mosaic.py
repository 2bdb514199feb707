"""The Mosaic kernels, compiled for an H200 and a B200: their code and what they move.

jaxlib compiles them itself and writes what it makes where it is told to:

    eqx_norm_statistics_0.ptx      the assembly
    eqx_norm_statistics_0.ptxas    what the assembler says of it
    eqx_norm_statistics_0.resources.txt

Numbers count the kernels of a name. `measure` gives a row for each kernel of a program, except
for those that the process has compiled before: these are not written again, which happens to
merges, since they are the same in programs of several dtypes.
"""

import functools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax

from eqx_norm._normalise import pallas_mosaic

from . import gpu_kernels_code, gpu_kernels_programs, hlo_traffic
from .gpu_kernels_code import Code
from .gpu_kernels_programs import Passes

PASSES = Passes(pallas_mosaic.statistics, pallas_mosaic.pulled_sums)
PREFIX = "eqx_norm_"
# The names under which jaxlib looks for these in the environment when it compiles.
_FOLDER, _PTX, _PTXAS = "MOSAIC_GPU_DUMP_TO", "MOSAIC_GPU_DUMP_PTX", "MOSAIC_GPU_DUMP_PTXAS"


class Row(NamedTuple):
    """One kernel of a program, the program's bytes in units of x, and what does not hold."""

    shape: tuple[int, ...]
    dtype: str
    program: str
    code: Code
    copies: int  # instructions that have a chunk copied to shared memory
    unfenced: bool  # a slot may be written again before all threads have read it
    program_units: float
    problem: str


def measure(
    compile_: Callable[..., str],
    folder: Path,
    shape: tuple[int, ...],
    dtype: str,
    direction: str,
    most_units: float,
) -> list[Row]:
    """Forward or backward with ReLU; `compile_` is of `gpu_compiler.compiler(target)`.

    `folder` is emptied.
    """
    for path in folder.iterdir():
        path.unlink()
    os.environ |= {_FOLDER: str(folder), _PTX: "1", _PTXAS: "1"}
    x = jax.ShapeDtypeStruct(shape, dtype)
    vector = jax.ShapeDtypeStruct((*shape[:-3], 1, shape[-2], 1), "float32")
    program = getattr(gpu_kernels_programs, direction)
    f = functools.partial(program, PASSES, jax.nn.relu)
    arrays: Any = (
        (x, vector, vector) if direction == "forward" else (x, x, vector, [vector] * 4)
    )
    units = hlo_traffic.units(compile_(f, *arrays), x.size * x.dtype.itemsize)
    return [
        _row(shape, dtype, direction, path, units, most_units)
        for path in sorted(folder.glob(f"{PREFIX}*.ptx"))
    ]


def _row(
    shape: tuple[int, ...],
    dtype: str,
    direction: str,
    path: Path,
    units: float,
    most_units: float,
) -> Row:
    text = path.read_text(encoding="utf-8")
    assembled, resources = (
        path.with_suffix(suffix).read_text(encoding="utf-8")
        for suffix in (".ptxas", ".resources.txt")
    )
    code = read(text, assembled, resources)
    copies = len(re.findall(r"\bcp\.async\.bulk\.tensor\S*\.global\.", text))
    problems = {
        "spills": code.spilled_bytes > 0,
        "atomics": code.atomics > 0,
        "no copies ahead": copies == 0,
        "unfenced": unfenced(text),
        f"more than {most_units} units": units > most_units,
    }
    problem = ", ".join(name for name, there in problems.items() if there)
    return Row(shape, dtype, direction, code, copies, unfenced(text), units, problem)


def read(ptx: str, assembled: str, resources: str) -> Code:
    """What jaxlib has written of one kernel."""
    return Code(
        _only(r"\.entry (\w+)_mosaic_gpu_kernel", ptx),
        int(_only(r"\.maxntid (\d+)", ptx)) // 32,
        int(_only(r"Used (\d+) registers", assembled)),
        int(_only(r"(\d+) bytes spill stores", assembled)),
        int(_only(r"smem_scratch_bytes=(\d+)", resources)),
        len(re.findall(r"\b(?:atom|red)\.", ptx)),
        gpu_kernels_code.loads(ptx),
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


def _only(pattern: str, text: str) -> str:
    (found,) = set(re.findall(pattern, text))
    return found
