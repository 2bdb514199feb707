"""How many bytes a compiled program moves, counted from the text of its optimised HLO.

On a GPU every operation of the entry computation that is not a mere view is a kernel: it
reads its operands from memory and writes its result there. What is fused into it stays in
registers. So the text of a fusion that reads `x` of 4 MB twice and writes a mean of 1 KB,

    %mean = f32[256]{0} fusion(%x, %x), kind=kInput, calls=%fused_reduce

tells that it moves 4.001 MB: each operand once, since the second read is of the same tile. An
operand of which a fusion only takes slices is counted as these slices. What caches save is
not seen, and neither is an access pattern that wastes bandwidth.
"""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple


class Instruction(NamedTuple):
    """One line of HLO: `%name = type opcode(%operands...), attributes`."""

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str

    @property
    def bytes(self) -> int:
        return sum(elements * bits for elements, bits in _arrays(self.type)) // 8

    @property
    def elements(self) -> int:
        """Of the largest array in the result."""
        return max((elements for elements, _ in _arrays(self.type)), default=0)

    @property
    def called(self) -> str | None:
        """The computation that a fusion or a call stands for."""
        found = re.search(r"\b(?:calls|to_apply)=%?([\w.-]+)", self.attributes)
        return found[1] if found else None


class Computation(NamedTuple):
    name: str
    instructions: dict[str, Instruction]

    def source(self, name: str) -> str:
        """The instruction whose memory this one is a view of."""
        while self.instructions[name].opcode == "bitcast":
            (name,) = self.instructions[name].operands
        return name


class Module(NamedTuple):
    computations: dict[str, Computation]
    entry: Computation


class Kernel(NamedTuple):
    """An operation that the device runs, and the bytes that it reads and writes."""

    name: str
    opcode: str
    bytes: int


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


def parse(text: str) -> Module:
    """**Raises:** `ValueError` where `text` holds no entry computation."""
    computations: dict[str, Computation] = {}
    entry = current = None
    for line in text.splitlines():
        # A computation starts in the first column: "ENTRY %main (x: f32[3]) -> f32[3] {".
        header = re.match(r"(ENTRY )?%?([\w.-]+) (?:\(.*)?\{$", line)
        if header:
            current = computations[header[2]] = Computation(header[2], {})
            entry = current if header[1] else entry
        elif current is not None and (instruction := _instruction(line)):
            current.instructions[instruction.name] = instruction
    if entry is None:
        raise ValueError("this text has no ENTRY computation; is it optimised HLO?")
    return Module(computations, entry)


def kernels(module: Module) -> list[Kernel]:
    """What the entry computation runs, in order, computations that it calls included.

    **Raises:** `NotImplementedError` for control flow and for asynchronous operations, whose
    traffic the text alone does not tell.
    """
    return [
        Kernel(instruction.name, instruction.opcode, _moved(module, computation, instruction))
        for computation, instruction in _run(module, module.entry)
    ]


def units(text: str, unit: int) -> float:
    """The bytes that the program moves, in units of so many bytes."""
    return sum(kernel.bytes for kernel in kernels(parse(text))) / unit


def layout_changes(text: str, elements: int) -> list[str]:
    """Where an array of at least so many elements is put into another order in memory.

    These are `copy` and `transpose`, by themselves or inside a fusion: in optimised HLO,
    transposes that need no work have become bitcasts.
    """
    module = parse(text)
    found = []
    for _, kernel in _run(module, module.entry):
        body = _fused(module, kernel)
        for inner in [kernel] if body is None else body.instructions.values():
            if inner.opcode in ("copy", "transpose") and inner.elements >= elements:
                found.append(f"{inner.opcode} {inner.type} in {kernel.name}")
    return found


def _run(module: Module, computation: Computation) -> Iterator[tuple[Computation, Instruction]]:
    for instruction in computation.instructions.values():
        if instruction.opcode == "call":  # on GPU: a sequence launched as one CUDA graph
            called = instruction.called
            assert called is not None, instruction
            yield from _run(module, module.computations[called])
        elif instruction.opcode in ("while", "conditional") or instruction.opcode.endswith(
            ("-start", "-done", "-update")
        ):
            raise NotImplementedError(
                f"%{instruction.name} = {instruction.opcode}(...): the traffic of control "
                "flow and of asynchronous operations is not counted."
            )
        elif instruction.opcode not in _VIEWS:
            yield computation, instruction


def _moved(module: Module, computation: Computation, kernel: Instruction) -> int:
    read: dict[str, int] = {}
    for position, operand in enumerate(kernel.operands):
        source = computation.source(operand)
        size = _read(module, kernel, position, computation.instructions[source].bytes)
        read[source] = max(size, read.get(source, 0))
    return sum(read.values()) + kernel.bytes


def _read(module: Module, kernel: Instruction, position: int, size: int) -> int:
    """The bytes that a kernel reads of an operand of `size` bytes."""
    if kernel.opcode in _SLICES and position == 0:
        return min(size, kernel.bytes)
    body = _fused(module, kernel)
    if body is None:
        return size
    (parameter,) = (
        instruction.name
        for instruction in body.instructions.values()
        if instruction.opcode == "parameter" and instruction.attributes == str(position)
    )
    elements = _demanded(body, parameter)
    whole = body.instructions[parameter].elements
    return size if elements >= whole else size * elements // whole


def _demanded(body: Computation, name: str) -> int:
    """How many elements of a value its users in a fusion ask for, at most."""
    users = [user for user in body.instructions.values() if name in user.operands]
    demanded = 0 if users else body.instructions[name].elements  # nobody uses the result
    for user in users:
        if user.opcode in _SLICES and user.operands[0] == name:
            demanded += user.elements
        elif user.opcode in _ONE_TO_ONE:  # in a fusion only what is asked for is calculated
            demanded += _demanded(body, user.name)
        else:
            return body.instructions[name].elements
    return demanded


def _fused(module: Module, kernel: Instruction) -> Computation | None:
    return module.computations[kernel.called or ""] if kernel.opcode == "fusion" else None


def _instruction(line: str) -> Instruction | None:
    start = re.match(r"\s+(?:ROOT )?%?([\w.-]+) = ", line)
    if not start:
        return None
    rest = re.sub(r"/\*.*?\*/", "", line[start.end() :])
    type_end = _closing(rest, 0) if rest.startswith("(") else rest.index(" ")
    opcode, _, _ = rest[type_end:].strip().partition("(")
    opening = rest.index("(", type_end)
    closing = _closing(rest, opening)
    inside, attributes = rest[opening + 1 : closing - 1], rest[closing:]
    if opcode in ("parameter", "constant"):  # parameter(0): a position, not an operand
        return Instruction(start[1], rest[:type_end], opcode, (), inside)
    operands = tuple(re.findall(r"%([\w.-]+)", inside))
    return Instruction(start[1], rest[:type_end], opcode, operands, attributes)


def _closing(text: str, opening: int) -> int:
    """The position after the parenthesis that closes the one at `opening`."""
    depth = 0
    for position in range(opening, len(text)):
        depth += {"(": 1, ")": -1}.get(text[position], 0)
        if depth == 0:
            return position + 1
    raise ValueError(f"a parenthesis is not closed: {text}")


def _arrays(type_: str) -> Iterator[tuple[int, int]]:
    """Number of elements and bits of an element for each array of a type."""
    for dtype, shape in re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", type_):
        elements = math.prod(int(size) for size in shape.split(",") if size)
        width = re.match(r"[a-z]+(\d+)", dtype)  # f8e4m3fn has 8 bits, a token none
        yield elements, 8 if dtype == "pred" else int(width[1]) if width else 0
