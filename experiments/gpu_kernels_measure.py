"""What the kernels are compiled to, for a shape, a dtype and a GPU: their code, and traffic."""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from eqx_norm._normalise.gpu import choice, mosaic, tiling, triton_rows
from eqx_norm._normalise.gpu.tiles import Columns, geometry
from eqx_norm._normalise.gpu.tiling import Tiling

from . import (
    gpu_compiler,
    gpu_kernels_code,
    gpu_kernels_mosaic,
    gpu_kernels_programs,
    gpu_targets,
    hlo_traffic,
)
from .gpu_kernels_code import PREFIX, Code
from .gpu_kernels_programs import MOSAIC, PASSES, TRITON, XLA

LOAD = 16  # bytes
MOST = {"forward": 3.05, "backward": 5.05}
LEAST = {"statistics": 1, "pulled_sums": 2, "rows": 2, "pulled_rows": 3}
# The loads of vectors, in a kernel that has six arguments.
VECTORS = 4
IMAGES = (64, 64, 32, 32)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel of a program, and what does not hold of it."""

    device: str
    shape: str
    dtype: str
    implementation: str
    kernel: str
    tile: str
    chunk: int
    chunks: int
    slices: int
    warps: int
    registers: int
    spilled_bytes: int
    shared_bytes: int
    occupancy: float
    loads: str
    copies: int
    atomics: int
    units: float
    least_share: float | None
    problem: str


@dataclasses.dataclass(frozen=True)
class Program:
    """What a program moves in units of x, and what does not hold of it."""

    device: str
    shape: str
    dtype: str
    program: str
    implementation: str
    units: float
    launches: int
    layout_changes: int
    problem: str


Measured = tuple[list[Kernel], Program]
# Of the HLO of a program, and the code of the kernels in it.
Compile = Callable[..., tuple[str, list[Code]]]


def compiler(device: str, folder: Path) -> Compile:
    """Gives `compile(f, *arguments)`, see `gpu_compiler`, with the kernels' code as well.

    `folder` is the one of `gpu_kernels_code.settings`.
    """
    to_hlo = gpu_compiler.compiler(gpu_targets.TARGETS[device])

    def compile_(f: Callable[..., Any], *arguments: Any) -> tuple[str, list[Code]]:
        for path in folder.glob("*/*"):
            path.unlink()
        with choice.quiet(), gpu_kernels_mosaic.quiet():
            text = to_hlo(f, *arguments)
        codes = [*gpu_kernels_code.read(folder), *gpu_kernels_mosaic.read(folder)]
        # XLA's threads write them in any order.
        return text, sorted(codes, key=lambda code: code.name)

    return compile_


def implementations(device: str, shape: tuple[int, ...], dtype: str) -> list[str]:
    """Those to be compiled: XLA's on one device alone, where it is what to compare with."""
    x = jax.ShapeDtypeStruct(shape, dtype)
    has_mosaic = (
        device != "A100" and mosaic.BACKEND.serves(x, activation=_activation(x)) is None
    )
    is_compared = device == "H200" and dtype != "float16"
    return [TRITON] + [MOSAIC] * has_mosaic + [XLA] * is_compared


def measure(
    compile_: Compile,
    device: str,
    shape: tuple[int, ...],
    dtype: str,
    direction: str,
    implementation: str,
) -> Measured:
    """One program, forward or backward, by one implementation."""
    x = jax.ShapeDtypeStruct(shape, dtype)
    vector = jax.ShapeDtypeStruct((*shape[:-3], 1, shape[-2], 1), "float32")
    program = getattr(gpu_kernels_programs, direction)
    f = functools.partial(program, PASSES[implementation], _activation(x))
    arrays: Any = (
        (x, vector, vector) if direction == "forward" else (x, x, vector, (vector,) * 4)
    )
    return _measured(device, x, *compile_(f, *arrays), direction, implementation)


def _activation(x: jax.ShapeDtypeStruct) -> Any:
    # All of LayerNorm is one channel, and its activation comes after weights of each value.
    return None if x.shape[-2] == 1 else jax.nn.relu


def measure_rows(
    compile_: Compile, device: str, shape: tuple[int, ...], dtype: str, direction: str
) -> Measured:
    """LayerNorm with GELU, whose kernels read a row once."""
    x = jax.ShapeDtypeStruct(shape, dtype)
    affine = [jax.ShapeDtypeStruct((1, 1, shape[-1]), "float32")] * 2
    if direction == "forward":
        f = functools.partial(triton_rows.rows, jax.nn.gelu, gpu_kernels_programs.EPS)
        text, codes = compile_(f, x, *affine)
    else:
        f = functools.partial(
            triton_rows.pulled_rows, jax.nn.gelu, gpu_kernels_programs.EPS, True
        )
        vectors = [jax.ShapeDtypeStruct((*shape[:-1], 1), "float32")] * 3
        text, codes = compile_(f, x, x, *affine, *vectors)
    return _measured(device, x, text, codes, direction, TRITON)


def _measured(
    device: str,
    x: jax.ShapeDtypeStruct,
    text: str,
    codes: Sequence[Code],
    direction: str,
    implementation: str,
) -> Measured:
    moved = _moved(text, x.size * x.dtype.itemsize)
    rows = [_kernel(device, x, implementation, code, moved[code.name]) for code in codes]
    most = math.inf if implementation == XLA else MOST[direction]
    program = _program(device, x, text, direction, implementation)
    too_much = f"more than {most} units" if program.units > most else ""
    return rows, dataclasses.replace(program, problem=too_much)


def measure_between(compile_: Compile, device: str, dtype: str) -> list[Program]:
    """Between convolutions: without a norm, and with one by each implementation."""
    image = jax.ShapeDtypeStruct(IMAGES, dtype)
    channels = IMAGES[1]
    kernel = jax.ShapeDtypeStruct((channels, channels, 3, 3), dtype)
    vector = jax.ShapeDtypeStruct((1, channels, 1), "float32")
    programs, without = [], 0
    for implementation in ("none", TRITON, *[MOSAIC] * (device != "A100"), XLA):
        f = functools.partial(gpu_kernels_programs.between, PASSES.get(implementation))
        text, _ = compile_(f, image, image, kernel, vector)
        program = _program(device, image, text, "between convolutions", implementation)
        if implementation == "none":
            without = program.layout_changes
        claimed = implementation != XLA and (device, dtype) != ("A100", "float32")
        adds = claimed and program.layout_changes > without
        problem = "adds copies or transposes" if adds else ""
        programs.append(dataclasses.replace(program, problem=problem))
    return programs


def _program(
    device: str, x: jax.ShapeDtypeStruct, text: str, name: str, implementation: str
) -> Program:
    return Program(
        device,
        _text(x.shape),
        x.dtype.name,
        name,
        implementation,
        hlo_traffic.units(text, x.size * x.dtype.itemsize),
        len(hlo_traffic.kernels(hlo_traffic.parse(text))),
        len(hlo_traffic.layout_changes(text, x.size)),
        "",
    )


def _kernel(
    device: str, x: jax.ShapeDtypeStruct, implementation: str, code: Code, units: float
) -> Kernel:
    name = code.name.removeprefix(PREFIX)
    cut, is_column = _cut(x, implementation, name)
    tile = (cut.lanes, cut.across) if is_column else (cut.across, cut.lanes)
    least = LEAST.get(name)
    problems = {
        "spills": code.spilled_bytes > 0,
        "atomics": code.atomics > 0,
        "no copies ahead": implementation == MOSAIC and code.copies == 0,
        "unfenced": code.unfenced,
    }
    if implementation == TRITON and not name.startswith("merge"):
        problems |= _narrow(x, name, code, cut, is_column)
    return Kernel(
        device,
        _text(x.shape),
        x.dtype.name,
        implementation,
        name,
        "x".join(map(str, tile)),
        cut.unroll,
        cut.chunks,
        cut.slices,
        code.warps,
        code.registers,
        code.spilled_bytes,
        code.shared_bytes,
        code.occupancy(gpu_targets.shared_memory(device)),
        " ".join(f"{count}x{size}" for size, count in sorted(code.loads.items())),
        code.copies,
        code.atomics,
        units,
        None if least is None else least / units,
        ", ".join(problem for problem, is_there in problems.items() if is_there),
    )


def _narrow(
    x: jax.ShapeDtypeStruct, name: str, code: Code, cut: Tiling, is_column: bool
) -> dict[str, bool]:
    """What is wrong with the loads of a kernel; nothing, if x has no aligned rows."""
    if x.shape[-2 if is_column else -1] * x.dtype.itemsize % LOAD:
        return {}
    wide = code.loads.get(LOAD, 0)
    inputs = 2 if name.startswith("pulled") else 1
    # Weight and bias of each tile are vectors, too.
    vectors = VECTORS + 2 * cut.unroll * name.endswith("rows")
    return {
        # Every thread loads each tile at once.
        "no 16-byte loads": wide < inputs * cut.unroll,
        "narrow loads": sum(code.loads.values()) - wide > vectors,
    }


def _cut(x: jax.ShapeDtypeStruct, implementation: str, name: str) -> tuple[Tiling, bool]:
    """How the work of a kernel is cut up, and whether in columns."""
    is_merge = name.startswith("merge")
    if x.ndim > 3 or x.shape[-2] > 1 or x.shape[-1] == 1:
        inputs = 2 if name.endswith("sums") else 1
        reading = geometry(x, inputs)
        if is_merge:
            least = mosaic.Mosaic.least_merged if implementation == MOSAIC else 1
            return tiling.merge(*reading.partials[1:], least), True
        return reading.tiling, isinstance(reading, Columns)
    rows = triton_rows.geometry_of(x, tiling.FORWARD if name == "rows" else tiling.LEARNING)
    if not is_merge:
        return rows.tiling, False
    programs = tiling.blocks(rows.programs, tiling.repeated(rows.programs))
    return tiling.merge(programs, x.shape[-1]), True


def _moved(text: str, x_bytes: int) -> dict[str, float]:
    """By each of the kernels, in units of x."""
    # Triton's kernels have a name of their own, Mosaic's are named by where they come from.
    named = rf'%([\w.-]+) = .*custom_call_target=.*(?: name = "|op_name="[^"]*/)({PREFIX}\w+)'
    names = dict(re.findall(named, text))
    moved = dict.fromkeys(names.values(), 0.0)
    for kernel in hlo_traffic.kernels(hlo_traffic.parse(text)):
        if kernel.name in names:
            moved[names[kernel.name]] += kernel.bytes / x_bytes
    return moved


def _text(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))
