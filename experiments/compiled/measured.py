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
    kernel: str
    warps: int
    registers: int
    spilled_bytes: int
    shared_bytes: int
    occupancy: float
    copies: int
    atomics: int
    units: float
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
            key = (case.shape, case.dtype, code.name)
            kernels.setdefault(key, _kernel(case, code, moved[code.name] / x_bytes))
    return programs, list(kernels.values())


def _by_name(text: str, found: Sequence[traffic.Launch]) -> dict[str, int]:
    """Returns the bytes that each of this package's kernels moves."""
    # They are named by where they come from.
    named = rf'%([\w.-]+) = .*custom_call_target=.*op_name="[^"]*/({PREFIX}\w+)'
    names = dict(re.findall(named, text))
    moved = dict.fromkeys(names.values(), 0)
    for launch in found:
        if launch.name in names:
            moved[names[launch.name]] += launch.bytes
    return moved


def _kernel(case: Case, code: Code, units: float) -> Kernel:
    return Kernel(
        case.device,
        case.shape,
        case.dtype,
        code.name.removeprefix(PREFIX),
        code.warps,
        code.registers,
        code.spilled_bytes,
        code.shared_bytes,
        code.occupancy(compiler.shared_memory(case.device)),
        code.copies,
        code.atomics,
        units,
        ", ".join(_problems(code)),
    )


def _problems(code: Code) -> Iterator[str]:
    """Yields what does not hold of a kernel."""
    if code.spilled_bytes:
        yield "spills"
    if code.atomics:
        yield "atomics"
    if not code.copies:
        yield "no copies ahead"
    if code.unfenced:
        yield "unfenced"
