"""Reads off the text of optimised HLO what a compiled program moves.

On a GPU every operation of the entry computation that is not a mere view is a kernel: it
reads its operands from memory and writes its result there. What is fused into it stays in
registers. So the text of a fusion that reads `x` of 4 MB twice and writes a mean of 1 KB,

    %mean = f32[256]{0} fusion(%x, %x), kind=kInput, calls=%fused_reduce

tells that it moves 4.001 MB: each operand once, since the second read is of the same tile. An
operand of which a fusion only takes slices is counted as these slices. What caches save is
not seen, and neither is an access pattern that wastes bandwidth.

Why JAX is not asked (jax 0.12.0.1): of a GPU that is not there it tells no cost analysis, and
the CPU's client, asked for that of the same module, takes a custom call for nothing (3.0 units
of x for 7.0) and an operand that is read in two places for two. `memory_analysis()` tells the
arrays that there are, not how often they are moved. And none tells kernels from each other, or
where an array is put into another layout.
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple


class Kernel(NamedTuple):
    """Holds an operation that the device runs."""

    name: str
    bytes: int  # that it reads and writes
    # Sizes, in elements, of the arrays that it puts into another order in memory: by `copy` and
    # `transpose`. In optimised HLO, transposes that need no work have become bitcasts.
    reordered: tuple[int, ...]


def kernels(text: str) -> list[Kernel]:
    """Returns what the program runs, in order, computations that it calls included.

    **Raises:** `ValueError` where `text` holds no entry computation; `NotImplementedError` for
    control flow and for asynchronous operations, whose traffic the text alone does not tell.
    """
    computations, entry = _parse(text)
    found = []
    for computation, kernel in _run(computations, entry):
        body = computations[kernel.called] if kernel.opcode == "fusion" else None
        inside = (kernel,) if body is None else body.values()
        reordered = tuple(i.elements for i in inside if i.opcode in ("copy", "transpose"))
        found.append(Kernel(kernel.name, _moved(computation, kernel, body), reordered))
    return found


def layout_changes(found: list[Kernel], elements: int) -> int:
    """Returns how often an array of at least so many elements changes its order in memory."""
    return sum(size >= elements for kernel in found for size in kernel.reordered)


class _Instruction(NamedTuple):
    """Holds one line of HLO: `%name = type opcode(%operands...), attributes`."""

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str  # of a parameter: its position

    @property
    def bytes(self) -> int:
        return sum(elements * bits for elements, bits in _arrays(self.type)) // 8

    @property
    def elements(self) -> int:
        """Returns the size of the largest array in the result."""
        return max((elements for elements, _ in _arrays(self.type)), default=0)

    @property
    def called(self) -> str:
        """Returns the computation that a fusion or a call stands for."""
        (name,) = re.findall(r"\b(?:calls|to_apply)=%?([\w.-]+)", self.attributes)
        return name


_Computation = Mapping[str, _Instruction]

# They name memory, or are known while compiling; they move nothing.
_VIEWS = {
    "add-dependency",
    "after-all",
    "bitcast",
    "constant",
    "get-tuple-element",
    "opt-barrier",
    "parameter",
    "partition-id",
    "replica-id",
    "tuple",
}
_SLICES = {"dynamic-slice", "gather", "slice"}
_ONE_TO_ONE = {"bitcast", "convert", "copy", "reshape", "transpose"}


def _run(
    computations: Mapping[str, _Computation], computation: _Computation
) -> Iterator[tuple[_Computation, _Instruction]]:
    for instruction in computation.values():
        opcode = instruction.opcode
        if opcode == "call":  # on GPU: a sequence launched as one CUDA graph
            yield from _run(computations, computations[instruction.called])
        elif opcode in ("while", "conditional") or opcode.endswith(
            ("-start", "-done", "-update")
        ):
            raise NotImplementedError(
                f"%{instruction.name} = {opcode}(...): the traffic of control flow and of "
                "asynchronous operations is not counted."
            )
        elif opcode not in _VIEWS:
            yield computation, instruction


def _moved(computation: _Computation, kernel: _Instruction, body: _Computation | None) -> int:
    """Returns the bytes that a kernel reads and writes; `body` is what a fusion calculates."""
    read: dict[str, int] = {}
    for position, operand in enumerate(kernel.operands):
        while computation[operand].opcode == "bitcast":  # a view of the same memory
            (operand,) = computation[operand].operands
        size = computation[operand].bytes
        if body is not None:
            size = _read(body, str(position), size)
        elif kernel.opcode in _SLICES and position == 0:
            size = min(size, kernel.bytes)
        read[operand] = max(size, read.get(operand, 0))
    return sum(read.values()) + kernel.bytes


def _read(body: _Computation, position: str, size: int) -> int:
    """Returns how much of its parameter of `size` bytes a fusion reads."""
    (parameter,) = (
        instruction
        for instruction in body.values()
        if instruction.opcode == "parameter" and instruction.attributes == position
    )
    demanded = _demanded(body, parameter)
    return size if demanded >= parameter.elements else size * demanded // parameter.elements


def _demanded(body: _Computation, value: _Instruction) -> int:
    """Returns how many elements of a value its users in a fusion ask for, at most."""
    users = [user for user in body.values() if value.name in user.operands]
    demanded = 0 if users else value.elements  # nobody uses the result
    for user in users:
        if user.opcode in _SLICES and user.operands[0] == value.name:
            demanded += user.elements
        elif user.opcode in _ONE_TO_ONE:  # in a fusion only what is asked for is calculated
            demanded += _demanded(body, user)
        else:
            return value.elements
    return demanded


def _parse(text: str) -> tuple[dict[str, _Computation], _Computation]:
    """Returns all computations, by name, and the entry."""
    computations: dict[str, _Computation] = {}
    current: dict[str, _Instruction] = {}
    entry = None
    for line in text.splitlines():
        # A computation starts in the first column: "ENTRY %main (x: f32[3]) -> f32[3] {".
        if header := re.match(r"(ENTRY )?%?([\w.-]+) (?:\(.*)?\{$", line):
            current = computations[header[2]] = {}
            entry = current if header[1] else entry
        elif instruction := _instruction(line):
            current[instruction.name] = instruction
    if entry is None:
        raise ValueError("this text has no ENTRY computation; is it optimised HLO?")
    return computations, entry


# A tuple's type is in parentheses, an operand is "%name" or "type %name".
_LINE = re.compile(r"\s+(?:ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*?)\)(.*)")


def _instruction(line: str) -> _Instruction | None:
    found = _LINE.match(re.sub(r"/\*.*?\*/", "", line))
    if found is None:
        return None
    name, type_, opcode, inside, attributes = found.groups()
    if opcode in ("parameter", "constant"):  # parameter(0): a position, not an operand
        return _Instruction(name, type_, opcode, (), inside)
    operands = tuple(re.findall(r"%([\w.-]+)", inside))
    return _Instruction(name, type_, opcode, operands, attributes)


def _arrays(type_: str) -> Iterator[tuple[int, int]]:
    """Yields the number of elements, and the bits of one, for each array of a type."""
    for dtype, shape in re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", type_):
        elements = math.prod(int(size) for size in shape.split(",") if size)
        width = re.match(r"[a-z]+(\d+)", dtype)  # f8e4m3fn has 8 bits, a token none
        yield elements, 8 if dtype == "pred" else int(width[1]) if width else 0
