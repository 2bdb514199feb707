"""Counts the memory traffic of a compiled program from its optimised HLO.

    sum(traffic.moved(program.as_text()).values())  # in bytes

Every operation of the entry computation that is not a mere view reads each operand (or slices
of an operand) from memory once, and writes its result to memory. Fused operations have no
traffic, nor has an array whose layout says S(1): it is in the fast memory of a TPU's core. The
count ignores caches, padding, and access patterns that waste bandwidth. JAX's `cost_analysis()`
(0.12.0.1) needs a GPU; on a CPU it counts nothing for this package's kernel, and twice an
operand that an operation reads in two places.
"""

import math
import re
from typing import NamedTuple

# The traffic of an asynchronous collective is counted where it starts.
_VIEWS = {"constant", "get-tuple-element", "opt-barrier", "parameter", "tuple"} | {
    "all-gather-done",
    "all-reduce-done",
    "reduce-scatter-done",
}
_SAME = {"bitcast", "copy-start", "slice-start"}  # in the operand's memory; copy-done copies
_SLICES = {"dynamic-slice", "gather", "slice", "slice-done"}
_ONE_TO_ONE = {"bitcast", "convert", "copy", "reshape", "transpose"}
_UNCOUNTED = re.compile(
    "call|while|conditional"
    "|(?!copy|slice|all-gather|all-reduce|reduce-scatter).*-(start|done|update)"
)
# An asynchronous collective's result has the type of what ends it.
_COLLECTIVES = (
    "(?:all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-done)?"
)
# A tuple's type is in parentheses, an operand is "%name" or "type %name".
_LINE = re.compile(r"\s+(?:ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*?)\)(.*)")
_ARRAY = re.compile(r"\b(?:pred|[a-z]+(\d+)\w*)\[([\d,]*)\](\{[^}]*S\(\d+\)\})?")


class Op(NamedTuple):
    """Holds a line of optimised HLO: `%name = type opcode(%operands...), attributes`."""

    opcode: str
    operands: list[str]
    attributes: str  # of a parameter: its position
    bytes: int  # of the result, as far as it is in the device's memory
    elements: int  # of the largest array in the result


def parse(text: str) -> dict[str, dict[str, Op]]:
    """Returns all computations of a program by name; "ENTRY" is the whole program."""
    computations, current = {}, {}
    for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
        # A computation starts in the first column: "ENTRY %main (x: f32[3]) -> f32[3] {".
        if header := re.match(r"(ENTRY )?%?([\w.-]+) (?:\(.*)?\{$", line):
            current = computations["ENTRY" if header[1] else header[2]] = {}
        elif found := _LINE.match(line):
            name, type_, opcode, inside, attributes = found.groups()
            if opcode in ("parameter", "constant"):  # parameter(0): a position, no operand
                inside, attributes = "", inside
            arrays = _ARRAY.findall(type_)
            sizes = [math.prod(map(int, re.findall(r"\d+", shape))) for _, shape, _ in arrays]
            bits = [n * int(a[0] or 8) for n, a in zip(sizes, arrays, strict=True) if not a[2]]
            operands, largest = re.findall(r"%([\w.-]+)", inside), max(sizes, default=0)
            current[name] = Op(opcode, operands, attributes, sum(bits) // 8, largest)
    return computations


def moved(text: str) -> dict[str, int]:
    """Returns the memory traffic of each operation of a program; on a GPU most are kernels."""
    computations, found = parse(text), {}
    for name, op in computations["ENTRY"].items():
        if _UNCOUNTED.fullmatch(op.opcode):  # its traffic is not in the text
            raise NotImplementedError(f"%{name} = {op.opcode}(...) is not counted")
        read: dict[str, int] = {}
        for position, operand in enumerate(op.operands):
            while computations["ENTRY"][operand].opcode in _SAME:  # the same memory
                (operand,) = computations["ENTRY"][operand].operands
            of = computations["ENTRY"][operand]
            demanded = _demanded(computations, op, position, of.elements)
            size = of.bytes * demanded // max(of.elements, 1)
            read[operand] = max(size, read.get(operand, 0))
        if op.opcode not in _VIEWS | _SAME:
            found[name] = sum(read.values()) + op.bytes
    return found


def sent(text: str) -> int:
    """Returns the bytes that a device gets from others by the collectives of a program."""
    arrays = _ARRAY.findall(" ".join(re.findall(rf"= (\(.*?\)|\S+) {_COLLECTIVES}\(", text)))
    sizes = (math.prod(map(int, re.findall(r"\d+", shape))) for _, shape, _ in arrays)
    return sum(n * int(bits or 8) // 8 for n, (bits, *_) in zip(sizes, arrays, strict=True))


def _demanded(computations: dict[str, dict[str, Op]], op: Op, position: int, whole: int) -> int:
    """Returns how many elements of an operand, which has `whole`, an operation reads."""
    if op.opcode in _SLICES and position == 0:
        return min(op.elements, whole)
    called = re.search(r"\bcalls=%?([\w.-]+)", op.attributes)
    if not called:
        return whole
    body = computations[called[1]]
    places = {o.attributes: name for name, o in body.items() if o.opcode == "parameter"}
    return _used(computations, body, places[str(position)])


def _used(computations: dict[str, dict[str, Op]], body: dict[str, Op], value: str) -> int:
    """Returns how many elements of a value are read by its users in a fusion."""
    asked, whole = [], body[value].elements
    for name, op in body.items():
        for position in (at for at, operand in enumerate(op.operands) if operand == value):
            if op.opcode in _ONE_TO_ONE:
                asked.append(_used(computations, body, name))
            else:
                asked.append(_demanded(computations, op, position, whole))
    return min(sum(asked), whole) if asked else whole
