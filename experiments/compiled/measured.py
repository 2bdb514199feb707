"""Compiles the programs, and notes what each is, and each of this package's kernels in it."""

import functools
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from tqdm import tqdm

from experiments.lab.peers import names

from . import assembly, compiler, traffic
from .assembly import PREFIX, Code
from .cases import BETWEEN, Case, cases, program
from .compiler import Compile
from .tiles import cut

LOAD = 16  # bytes
# The times that each kernel has to move x, at least.
LEAST = {"statistics": 1, "vjp_sums": 2, "rows": 2, "rows_vjp": 3}
# The loads of vectors, in a kernel that has six arguments.
VECTORS = 4


class Program(NamedTuple):
    """Says what a program moves, in units of the bytes of x."""

    device: str
    program: str
    shape: tuple[int, ...]
    dtype: str
    direction: str
    implementation: str
    units: float | None
    launches: int | None
    layout_changes: int | None  # copies and transposes of arrays of the size of x
    failure: str = ""  # why there is no program


class Kernel(NamedTuple):
    """Holds the code of a kernel, what it moves, and what is wrong with it."""

    device: str
    shape: tuple[int, ...]
    dtype: str
    implementation: str
    kernel: str
    tile: tuple[int, ...]  # of a kernel that reads x
    chunk: int | None  # of so many tiles
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


def compiled(device: str, quick: bool) -> tuple[list[Program], list[Kernel]]:
    """Returns what all programs for a device compile to, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= assembly.settings(folder)
        take = functools.partial(assembly.take, folder)
        return measure(cases(device, quick), compiler.compiler(device), take)


def measure(
    chosen: Sequence[Case], compile_: Compile, take: Callable[[], list[Code]]
) -> tuple[list[Program], list[Kernel]]:
    """`take` returns the code of the kernels in what `compile_` compiled last."""
    programs: list[Program] = []
    # One for each program of a layer is enough; and jaxlib writes none twice.
    kernels: dict[tuple[object, ...], Kernel] = {}
    for case in tqdm(chosen, desc=chosen[0].device, disable=None):
        function, arguments = program(case)
        try:
            text = compile_(function, *arguments)
        except TypeError as error:
            # It mixes dtypes where input and parameters do not have the same.
            if case.implementation != names.EQUINOX_EMA:
                raise
            programs.append(Program(*case, None, None, None, type(error).__name__))
            continue
        x_bytes = case.x.size * case.x.dtype.itemsize
        found, codes = traffic.launches(text), take()
        units = sum(launch.bytes for launch in found) / x_bytes
        changes = traffic.layout_changes(found, case.x.size)
        programs.append(Program(*case, units, len(found), changes))
        moved = _by_name(text, found)
        for code in codes if case.program != BETWEEN else []:
            key = (case.shape, case.dtype, case.implementation, code.name)
            kernels.setdefault(key, _kernel(case, code, moved[code.name] / x_bytes))
    return programs, list(kernels.values())


def _by_name(text: str, found: Sequence[traffic.Launch]) -> dict[str, int]:
    """Returns the bytes that each of this package's kernels moves."""
    # Triton's kernels have a name of their own, Mosaic's are named by where they come from.
    named = rf'%([\w.-]+) = .*custom_call_target=.*(?: name = "|op_name="[^"]*/)({PREFIX}\w+)'
    names = dict(re.findall(named, text))
    moved = dict.fromkeys(names.values(), 0)
    for launch in found:
        if launch.name in names:
            moved[names[launch.name]] += launch.bytes
    return moved


def _kernel(case: Case, code: Code, units: float) -> Kernel:
    name = code.name.removeprefix(PREFIX)
    least, read = LEAST.get(name), cut(case, name)
    return Kernel(
        case.device,
        case.shape,
        case.dtype,
        case.implementation,
        name,
        read.tile if read else (),
        read.chunk if read else None,
        code.warps,
        code.registers,
        code.spilled_bytes,
        code.shared_bytes,
        code.occupancy(compiler.shared_memory(case.device)),
        " ".join(f"{count}x{size}" for size, count in sorted(code.loads.items())),
        code.copies,
        code.atomics,
        units,
        least / units if least else None,
        ", ".join(_problems(case, name, code)),
    )


def _problems(case: Case, name: str, code: Code) -> Iterator[str]:
    """Yields what does not hold of a kernel."""
    if code.spilled_bytes:
        yield "spills"
    if code.atomics:
        yield "atomics"
    if case.implementation == names.OURS_MOSAIC:
        if not code.copies:
            yield "no copies ahead"
        if code.unfenced:
            yield "unfenced"
    elif (read := cut(case, name)) and read.line % LOAD == 0:
        wide = code.loads.get(LOAD, 0)
        # Every thread loads each tile at once.
        if wide < (2 if "vjp" in name else 1) * read.chunk:
            yield "no 16-byte loads"
        # Weight and bias of each tile are vectors, too.
        if sum(code.loads.values()) - wide > VECTORS + 2 * read.chunk * name.endswith("rows"):
            yield "narrow loads"
