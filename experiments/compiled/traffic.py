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

    **Raises:** `NotImplementedError` for control flow and for asynchronous operations, whose
    traffic the text alone does not tell.
    """
    computations = _parse(text)
    found = []
    for computation, kernel in _run(computations, "ENTRY"):
        body = computations[kernel.called] if kernel.opcode == "fusion" else {}
        inside = body.values() or (kernel,)
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
    operands: list[str]
    attributes: str  # of a parameter: its position

    @property
    def arrays(self) -> list[tuple[int, int]]:
        """Returns the number of elements, and the bits of one, for each array of the type."""
        found = re.findall(r"\b(?:pred|[a-z]+(\d+)\w*)\[([\d,]*)\]", self.type)
        return [
            (math.prod(map(int, re.findall(r"\d+", shape))), int(bits or 8))
            for bits, shape in found
        ]

    @property
    def bytes(self) -> int:
        return sum(elements * bits for elements, bits in self.arrays) // 8

    @property
    def elements(self) -> int:
        """Returns the size of the largest array in the result."""
        return max((elements for elements, _ in self.arrays), default=0)

    @property
    def called(self) -> str:
        """Returns the computation that a fusion or a call stands for."""
        (name,) = re.findall(r"\b(?:calls|to_apply)=%?([\w.-]+)", self.attributes)
        return name


_Computation = Mapping[str, _Instruction]

# They name memory, or are known while compiling; they move nothing.
_VIEWS = {"bitcast", "constant", "get-tuple-element", "opt-barrier", "parameter", "tuple"}
_SLICES = {"dynamic-slice", "gather", "slice"}
_ONE_TO_ONE = {"bitcast", "convert", "copy", "reshape", "transpose"}
_UNCOUNTED = re.compile(r"while|conditional|.*-(start|done|update)")


def _run(
    computations: Mapping[str, _Computation], name: str
) -> Iterator[tuple[_Computation, _Instruction]]:
    """Yields the instructions that move something, each with the computation it is in."""
    for instruction in computations[name].values():
        opcode = instruction.opcode
        if opcode == "call":  # on GPU: a sequence launched as one CUDA graph
            yield from _run(computations, instruction.called)
        elif _UNCOUNTED.fullmatch(opcode):
            raise NotImplementedError(
                f"%{instruction.name} = {opcode}(...): the traffic of control flow and of "
                "asynchronous operations is not counted."
            )
        elif opcode not in _VIEWS:
            yield computations[name], instruction


def _moved(computation: _Computation, kernel: _Instruction, body: _Computation) -> int:
    """Returns the bytes that a kernel reads and writes; `body` is what a fusion computes."""
    parameters = {i.attributes: i for i in body.values() if i.opcode == "parameter"}
    read: dict[str, int] = {}
    for position, operand in enumerate(kernel.operands):
        while computation[operand].opcode == "bitcast":  # a view of the same memory
            (operand,) = computation[operand].operands
        size = computation[operand].bytes
        if body:
            parameter = parameters[str(position)]
            size = min(size, size * _demanded(body, parameter) // parameter.elements)
        elif kernel.opcode in _SLICES and position == 0:
            size = min(size, kernel.bytes)
        read[operand] = max(size, read.get(operand, 0))
    return sum(read.values()) + kernel.bytes


def _demanded(body: _Computation, value: _Instruction) -> int:
    """Returns how many elements of a value its users in a fusion ask for, at most."""
    users = [user for user in body.values() if value.name in user.operands]
    demanded = 0 if users else value.elements  # nobody uses the result
    for user in users:
        if user.opcode in _SLICES and user.operands[0] == value.name:
            demanded += user.elements
        elif user.opcode in _ONE_TO_ONE:  # in a fusion only what is asked for is computed
            demanded += _demanded(body, user)
        else:
            return value.elements
    return demanded


# A tuple's type is in parentheses, an operand is "%name" or "type %name".
_LINE = re.compile(r"\s+(?:ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*?)\)(.*)")


def _parse(text: str) -> dict[str, _Computation]:
    """Returns all computations by name, that of the whole program as `ENTRY`."""
    computations: dict[str, _Computation] = {}
    current: dict[str, _Instruction] = {}
    for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
        # A computation starts in the first column: "ENTRY %main (x: f32[3]) -> f32[3] {".
        if header := re.match(r"(ENTRY )?%?([\w.-]+) (?:\(.*)?\{$", line):
            current = computations["ENTRY" if header[1] else header[2]] = {}
        elif found := _LINE.match(line):
            name, type_, opcode, inside, attributes = found.groups()
            if opcode in ("parameter", "constant"):  # parameter(0): a position, no operand
                inside, attributes = "", inside
            operands = re.findall(r"%([\w.-]+)", inside)
            current[name] = _Instruction(name, type_, opcode, operands, attributes)
    return computations
