"""The Pallas-Triton kernels, compiled for an A100, an H200 and a B200 that are not there.

    python -m experiments.gpu_kernels          where jax's CUDA plugin is installed
    python -m experiments.gpu_kernels --quick  two shapes on an H200

(It is in .venv-gpu-compile, which make gpu-compile-check sets up.)

Five things are claimed; four of every kernel for every shape and dtype below:

1. Nothing is spilled: what a thread works on stays in its registers.
2. Nothing is added atomically, so that sums are the same in every run.
3. x and g are loaded 16 bytes at a time, where their rows are multiples of that.
4. A normalisation with ReLU moves at most 3.05 times the bytes of x forward and 5.05 times
   backward, where 3 and 5 are the least for two passes.

And between two convolutions, where arrays have a layout that is XLA's own:

5. The kernels do not have x written out again in theirs. (Not claimed of float32 on an A100,
   where XLA leaves it in the caller's layout.)

It exits with 1 where a claim does not hold. Nothing runs, so nothing is timed.
"""

import argparse
import csv
import dataclasses
import functools
import importlib.util
import itertools
import math
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from eqx_norm._normalise import pallas_triton, pallas_triton_rows, tiling
from eqx_norm._normalise.pallas_triton_tiles import Geometry

from . import (
    gpu_compiler,
    gpu_kernels_code,
    gpu_kernels_programs,
    gpu_targets,
    hlo_traffic,
    results,
)
from .gpu_kernels_programs import KERNELS, PASSES

PLUGIN = ("jax-cuda12-plugin", "jax-cuda12-pjrt", "nvidia-cuda-nvcc-cu12")
PREFIX = "eqx_norm_"
LOAD = 16  # bytes
MOST = {"forward": 3.05, "backward": 5.05}
LEAST = {"statistics": 1, "pulled_sums": 2, "rows": 2, "pulled_rows": 3}
# The loads of vectors, in a kernel that has six arguments.
VECTORS = 4


def _other(**fields: Any) -> str:
    """The H200's description, with other numbers."""
    target = gpu_targets.H200
    for name, value in fields.items():
        target, changes = re.subn(rf"(?m)^(\s*{name}):? .*$", rf"\g<1>{value}", target)
        assert changes == 1, name
    return target


# Description, and shared memory of a core in bytes.
TARGETS = {
    "A100": (
        _other(
            name=': "NVIDIA A100-SXM4-80GB"',
            cuda_compute_capability=" { major: 8 minor: 0 }",
            core_count=": 108",
            fpus_per_core=": 64",
            clock_rate_ghz=": 1.41",
            device_memory_size=": 85899345920",
            memory_bandwidth=": 2039000000000",
            l2_cache_size=": 41943040",
            shared_memory_per_block_optin=": 166912",
            shared_memory_per_core=": 167936",
            device_description_str=': "NVIDIA A100-SXM4-80GB"',
        ),
        167936,
    ),
    "H200": (gpu_targets.H200, 233472),
    "B200": (
        _other(
            name=': "NVIDIA B200"',
            cuda_compute_capability=" { major: 10 minor: 0 feature_extension: "
            "ACCELERATED_FEATURES }",
            core_count=": 148",
            device_memory_size=": 191000000000",
            memory_bandwidth=": 8000000000000",
            l2_cache_size=": 132644864",
            device_description_str=': "NVIDIA B200"',
        ),
        233472,
    ),
}

# (*ensemble, examples, channels, values). In columns, as convolutions have them on a GPU: of
# layers of a ResNet-50, and of 256, 200 and 33 channels. In rows: long ones; and images.
SHAPES = [
    (65536, 256, 1),
    (802816, 64, 1),
    (6272, 1024, 1),
    (1568, 2048, 1),
    (65521, 200, 1),
    (65521, 33, 1),
    (8192, 1, 1, 16384),
    (64, 1, 1, 1000000),
    (32, 3, 50176),
]
QUICK = [SHAPES[0], SHAPES[5]]
# (examples, 1, values): of LayerNorm, where a program holds a row.
ROWS = [(8192, 1, values) for values in (768, 1000, 4096)]
SHOWN = ("H200", "bfloat16")
IMAGES = (64, 64, 32, 32)
DTYPES = ("bfloat16", "float32", "float16")


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel of a program, and what does not hold of it."""

    device: str
    shape: str
    dtype: str
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


Compiled = tuple[str, list[gpu_kernels_code.Code]]
# Of the HLO of a program, and the code of the kernels in it.
Compile = Callable[..., Compiled]


def compiler(target: str, folder: Path) -> Compile:
    """Gives `compile(f, *arguments)`, see `gpu_compiler`, with the kernels' code as well.

    `folder` is the one that XLA was told to write to.
    """
    to_hlo = gpu_compiler.compiler(target)

    def compile_(f: Callable[..., Any], *arguments: Any) -> Compiled:
        for path in folder.iterdir():
            path.unlink()
        with pallas_triton.quiet():
            text = to_hlo(f, *arguments)
        return text, gpu_kernels_code.read(folder, PREFIX)

    return compile_


def measure(
    compile_: Compile, device: str, shape: tuple[int, ...], dtype: str, name: str
) -> tuple[list[Kernel], Program]:
    """One program, forward or backward, by one implementation."""
    direction, implementation = name.split(", ")
    # All of LayerNorm is one channel, and its activation comes after weights of each value.
    activation = None if shape[-2] == 1 else jax.nn.relu
    x = jax.ShapeDtypeStruct(shape, dtype)
    vector = jax.ShapeDtypeStruct((*shape[:-3], 1, shape[-2], 1), "float32")
    passes = PASSES[implementation]
    if direction == "forward":
        f = functools.partial(gpu_kernels_programs.forward, passes, activation)
        text, codes = compile_(f, x, vector, vector)
    else:
        f = functools.partial(gpu_kernels_programs.backward, passes, activation)
        text, codes = compile_(f, x, x, vector, (vector,) * 4)
    return _measured(device, x, text, codes, direction, implementation)


def measure_rows(
    compile_: Compile, device: str, shape: tuple[int, ...], dtype: str, direction: str
) -> tuple[list[Kernel], Program]:
    """LayerNorm with GELU, whose kernels read a row once."""
    x = jax.ShapeDtypeStruct(shape, dtype)
    affine = [jax.ShapeDtypeStruct((1, 1, shape[-1]), "float32")] * 2
    if direction == "forward":
        f = functools.partial(pallas_triton_rows.rows, jax.nn.gelu, gpu_kernels_programs.EPS)
        text, codes = compile_(f, x, *affine)
    else:
        f = functools.partial(
            pallas_triton_rows.pulled_rows, jax.nn.gelu, gpu_kernels_programs.EPS, True
        )
        vectors = [jax.ShapeDtypeStruct((*shape[:-1], 1), "float32")] * 3
        text, codes = compile_(f, x, x, *affine, *vectors)
    return _measured(device, x, text, codes, direction, KERNELS)


def _measured(
    device: str,
    x: jax.ShapeDtypeStruct,
    text: str,
    codes: Sequence[gpu_kernels_code.Code],
    direction: str,
    implementation: str,
) -> tuple[list[Kernel], Program]:
    x_bytes = x.size * x.dtype.itemsize
    moved = _moved(text, x_bytes)
    rows = [_kernel(device, x, code, moved[code.name]) for code in codes]
    units = hlo_traffic.units(text, x_bytes)
    most = MOST[direction] if implementation == KERNELS else math.inf
    problem = f"more than {most} units" if units > most else ""
    launches = len(hlo_traffic.kernels(hlo_traffic.parse(text)))
    changes = len(hlo_traffic.layout_changes(text, x.size))
    return rows, Program(
        device,
        _text(x.shape),
        x.dtype.name,
        direction,
        implementation,
        units,
        launches,
        changes,
        problem,
    )


def measure_between(compile_: Compile, device: str, dtype: str) -> list[Program]:
    """Between convolutions: without a norm, and with one by each implementation."""
    image = jax.ShapeDtypeStruct(IMAGES, dtype)
    channels = IMAGES[1]
    kernel = jax.ShapeDtypeStruct((channels, channels, 3, 3), dtype)
    vector = jax.ShapeDtypeStruct((1, channels, 1), "float32")
    programs, without = [], 0
    for implementation in ("none", *PASSES):
        f = functools.partial(gpu_kernels_programs.between, PASSES.get(implementation))
        text, _ = compile_(f, image, image, kernel, vector)
        changes = len(hlo_traffic.layout_changes(text, image.size))
        without = changes if implementation == "none" else without
        claimed = implementation == KERNELS and (device, dtype) != ("A100", "float32")
        problem = "adds copies or transposes" if claimed and changes > without else ""
        programs.append(
            Program(
                device,
                _text(IMAGES),
                dtype,
                "between convolutions",
                implementation,
                hlo_traffic.units(text, image.size * image.dtype.itemsize),
                len(hlo_traffic.kernels(hlo_traffic.parse(text))),
                changes,
                problem,
            )
        )
    return programs


def _kernel(
    device: str, x: jax.ShapeDtypeStruct, code: gpu_kernels_code.Code, units: float
) -> Kernel:
    name = code.name.removeprefix(PREFIX)
    inputs = 2 if name.startswith("pulled") else 1
    geometry, partials = _geometry(x, name)
    cut, down = geometry.tiling, geometry.axis == 0
    problems = []
    if name.startswith("merge"):
        down = True
        cut = tiling.merge(*partials)
    elif x.shape[-2 if down else -1] * x.dtype.itemsize % LOAD == 0:
        # Every thread loads each tile at once.
        if code.loads.get(LOAD, 0) < inputs * cut.unroll:
            problems.append("no 16-byte loads")
        # Weight and bias of each tile are vectors, too.
        vectors = VECTORS + 2 * cut.unroll * name.endswith("rows")
        if sum(code.loads.values()) - code.loads.get(LOAD, 0) > vectors:
            problems.append("narrow loads")
    problems += ["spills"] * (code.spilled_bytes > 0) + ["atomics"] * (code.atomics > 0)
    least = LEAST.get(name)
    lanes, across = cut.lanes, cut.across
    return Kernel(
        device,
        _text(x.shape),
        x.dtype.name,
        name,
        f"{lanes}x{across}" if down else f"{across}x{lanes}",
        cut.unroll,
        cut.chunks,
        cut.slices,
        code.warps,
        code.registers,
        code.spilled_bytes,
        code.shared_bytes,
        code.occupancy(TARGETS[device][1]),
        " ".join(f"{count}x{size}" for size, count in sorted(code.loads.items())),
        code.atomics,
        units,
        None if least is None else least / units,
        ", ".join(problems),
    )


def _geometry(x: jax.ShapeDtypeStruct, name: str) -> tuple[Geometry, tuple[int, int]]:
    """How a kernel reads x; and how many partial results a merge has to read, of how much."""
    if x.ndim > 3 or x.shape[-2] > 1 or x.shape[-1] == 1:
        geometry = pallas_triton.geometry(x, 2 if name.endswith("sums") else 1)
        return geometry, geometry.partials[1:]
    geometry = pallas_triton_rows.geometry_of(
        x, pallas_triton_rows.FORWARD if name == "rows" else pallas_triton_rows.LEARNING
    )
    programs = tiling.blocks(geometry.programs, tiling.repeated(geometry.programs))
    return geometry, (programs, x.shape[-1])


def _moved(text: str, x_bytes: int) -> dict[str, float]:
    """By each of the kernels, in units of x."""
    names = dict(
        re.findall(rf'%([\w.-]+) = .*custom_call_target=.* name = "({PREFIX}\w+)"', text)
    )
    moved = dict.fromkeys(names.values(), 0.0)
    for kernel in hlo_traffic.kernels(hlo_traffic.parse(text)):
        if kernel.name in names:
            moved[names[kernel.name]] += kernel.bytes / x_bytes
    return moved


def _text(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def run(compiled: Callable[[str], Compile], quick: bool) -> tuple[list[Kernel], list[Program]]:
    """`compiled` gives the compiler for a description."""
    devices = ["H200"] if quick else list(TARGETS)
    dtypes = DTYPES[:1] if quick else DTYPES
    jobs = list(itertools.product(devices, QUICK if quick else SHAPES, dtypes))
    names = [f"{direction}, {i}" for direction, i in itertools.product(MOST, PASSES)]
    rows: list[Kernel] = []
    programs: list[Program] = []
    compilers = {device: compiled(TARGETS[device][0]) for device in devices}
    for device, shape, dtype in tqdm(jobs, disable=None, desc="compiling"):
        for name in names:
            if name.endswith(KERNELS) or (device == "H200" and dtype != "float16"):
                found, program = measure(compilers[device], device, shape, dtype, name)
                rows += found
                programs.append(program)
    jobs = list(itertools.product(devices, ROWS[:1] if quick else ROWS, dtypes, MOST))
    for device, shape, dtype, direction in tqdm(jobs, disable=None, desc="compiling rows"):
        found, program = measure_rows(compilers[device], device, shape, dtype, direction)
        rows += found
        programs.append(program)
    for device, dtype in itertools.product(devices, dtypes[:2]):
        programs += measure_between(compilers[device], device, dtype)
    return rows, programs


def report(rows: Sequence[Kernel], programs: Sequence[Program]) -> str:
    """The kernels on an H200, and all programs that are not as claimed."""
    shown = [row for row in rows if row.device == "H200" and not row.kernel.startswith("merge")]
    kernels = results.table(
        ("kernel", "x", "dtype", "tile", "registers", "occupancy", "units", "of least"),
        [
            (
                row.kernel,
                row.shape,
                row.dtype,
                f"{row.chunk} x {row.tile}",
                str(row.registers),
                f"{row.occupancy:.0%}",
                f"{row.units:.3f}",
                "" if row.least_share is None else f"{row.least_share:.1%}",
            )
            for row in shown
        ],
    )
    moved = results.table(
        (
            "program",
            "device",
            "x",
            "dtype",
            "implementation",
            "units",
            "launches",
            "layout changes",
        ),
        [
            (
                program.program,
                program.device,
                program.shape,
                program.dtype,
                program.implementation,
                f"{program.units:.3f}",
                str(program.launches),
                str(program.layout_changes),
            )
            for program in programs
            if program.device == "H200" or program.problem
        ],
    )
    return f"{kernels}\n\n{moved}"


def summary(path: Path) -> str:
    """For the README: the kernels in bfloat16 on an H200, as `save` has written them."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if (row["device"], row["dtype"]) == SHOWN]
    return results.table(
        (
            "kernel",
            "x",
            "tiles",
            "registers",
            "shared memory",
            "occupancy",
            "units of x",
            "least",
        ),
        [
            (
                row["kernel"],
                row["shape"],
                f"{row['chunk']} x {row['tile']}",
                row["registers"],
                f"{row['shared_bytes']} B",
                f"{float(row['occupancy']):.0%}",
                f"{float(row['units']):.2f}",
                f"{float(row['least_share']):.0%}",
            )
            for row in rows
            if row["least_share"]
        ],
    )


def claims(rows: Sequence[Kernel], programs: Sequence[Program]) -> dict[str, list[str]]:
    """What does not hold of each claim: empty where it does."""

    def of(problem: str) -> list[str]:
        return [
            f"{row.device} {row.shape} {row.dtype} "
            f"{row.kernel if isinstance(row, Kernel) else row.program}"
            for row in (*rows, *programs)
            if problem in row.problem
        ]

    return {
        "nothing is spilled": of("spills"),
        "nothing is added atomically": of("atomics"),
        "x and g are loaded 16 bytes at a time": of("loads"),
        "at most 3.05 units forward and 5.05 backward": of("more than"),
        "no layout changes between convolutions": of("adds"),
    }


def save(
    folder: Path, rows: Sequence[Kernel], programs: Sequence[Program], seconds: float
) -> None:
    for name, kind, table in (
        ("gpu_kernels.csv", Kernel, rows),
        ("gpu_kernels_programs.csv", Program, programs),
    ):
        header = [field.name for field in dataclasses.fields(kind)]
        lines = [[_cell(getattr(row, name)) for name in header] for row in table]
        results.write_csv(folder / name, header, lines)
    results.write_json(
        folder / "gpu_kernels.json",
        {
            "environment": {
                **results.environment(*PLUGIN),
                "device": "compiled for, not run on: " + ", ".join(TARGETS),
            },
            "most_units": MOST,
            "does_not_hold": claims(rows, programs),
            "seconds": seconds,
        },
    )


def _cell(value: Any) -> Any:
    if value is None:
        return ""
    return f"{value:.4f}" if isinstance(value, float) else value


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("jax_cuda12_plugin") is None:
        parser.exit(
            2,
            "To compile for a GPU takes jax's CUDA plugin, which is not installed here: "
            "make gpu-compile-check sets up an environment that has it (no GPU needed).\n",
        )
    whole = Path(os.path.relpath(results.FOLDER.parent))
    out: Path = options.out or (Path("build/gpu_kernels") if options.quick else whole)
    folder = out / "results"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.exit(2, f"--out {out}: {folder} cannot be made ({error.strerror})\n")
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as written:
        # Read by XLA when it compiles for the first time.
        os.environ["XLA_FLAGS"] = gpu_kernels_code.FLAGS.format(folder=written)
        compiled = functools.partial(compiler, folder=Path(written))
        rows, programs = run(compiled, options.quick)
    seconds = round(time.perf_counter() - started, 1)
    save(folder, rows, programs, seconds)
    print(report(rows, programs))
    wrong = claims(rows, programs)
    for claim, where in wrong.items():
        print(f"{'DOES NOT HOLD' if where else 'holds'}: {claim}", *where, sep="\n    ")
    print(
        f"{len(rows)} kernels in {len(programs)} programs; in {seconds} s; results in {folder}"
    )
    return int(any(wrong.values()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.gpu_kernels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="two shapes on an H200, bfloat16")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="writes DIR/results (default: experiments for the whole job, build/gpu_kernels "
        "for --quick)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
