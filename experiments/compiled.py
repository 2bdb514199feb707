"""Counts the bytes that the layers move on an H200, in compiled programs, without a GPU.

    make gpu-compile-check                  all of it (6 minutes), in its own environment
    python -m experiments.compiled          the same, if jax's CUDA plugin is installed
    python -m experiments.compiled --quick  a few programs, under 30 seconds

On a GPU, normalisation takes the time to move its arrays between memory and processor. XLA
compiles for a GPU from its description, and the program shows how much it moves, here in units
of the bytes of x: at least 3 forward and 5 backward. Nothing runs; only compilation is timed.
If y and its cotangent are known together ("forward + backward"), XLA saves a read of x, which
it cannot in training ("forward, then backward"). "eqx-norm" is compiled by XLA, "eqx-norm,
pallas" uses this package's kernel for the statistics. docs/gpu.md says what follows for a GPU.
"""

import functools
import importlib.util
import itertools
import math
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from tqdm import tqdm

from eqx_norm import BatchNorm
from eqx_norm.models import recompute_outputs

from .common import peers, report, training
from .common.exact import EPS
from .common.peers import EQUINOX, OURS, OURS_PALLAS, OURS_SEPARATE

Row = dict[str, Any]
FORWARD, BOTH, APART = "forward", "forward + backward", "forward, then backward"
RELU, LAYER_NORM, BETWEEN = "BatchNorm + ReLU", "LayerNorm", "conv, BatchNorm + ReLU, conv"
ALONE = {RELU: jax.nn.relu, "BatchNorm + GELU": jax.nn.gelu, "BatchNorm + SiLU": jax.nn.silu}
NO_NORM, LAYERS = "no norm", (OURS, OURS_PALLAS, OURS_SEPARATE, EQUINOX)
DTYPES, DENSE, IMAGES = ("bfloat16", "float32"), (65536, 256), (64, 64, 32, 32)
# Shapes of a ResNet-50, with the channels last as convolutions return them on a GPU.
COLUMNS = (DENSE, (802816, 64), (6272, 1024), (1568, 2048))
CASE = ("program", "shape", "direction", "layer", "dtype")  # every combination is compiled
GRIDS = (
    (ALONE, (DENSE, IMAGES), (BOTH,), (OURS, OURS_PALLAS), DTYPES),
    ((RELU,), (DENSE, IMAGES), (FORWARD, BOTH, APART), LAYERS, DTYPES),
    ((BETWEEN,), (IMAGES,), (BOTH,), (NO_NORM, *LAYERS), DTYPES),
    ((LAYER_NORM,), (DENSE,), (FORWARD, BOTH, APART), (OURS, EQUINOX), DTYPES),
    ((RELU,), COLUMNS, (FORWARD, APART), (OURS_PALLAS,), DTYPES),
)
UNITS = {name: f"{name}, MB" for name in ("kept", "temporaries", "moved")}  # in tables
JIT, SHARD_MAP, COUNT, CHANNELS = "jit", "shard_map", 8, 64  # of the step over 8 devices
MAPPED: Any = {"axis_name": "batch", "in_axes": (0, None), "out_axes": (0, None)}


def mesh_of(count: int) -> Mesh:
    """Returns a mesh of `count` H200s on one host, with the axis "devices"."""
    target = Path(__file__).with_name("data") / "h200.txtpb"
    about = {"target_config": target.read_text(), "topology": f"{count}x1x1"}
    described = topologies.get_topology_desc(platform="cuda", **about)
    return Mesh(described.devices, ("devices",), axis_types=(AxisType.Auto,))


def like(tree: Any, mesh: Mesh, *axes: str) -> Any:
    """Replaces arrays by their shapes and dtypes, split along axes of a mesh."""
    placed = functools.partial(jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, jax.P(*axes)))
    return jax.tree.map(lambda leaf: placed(leaf.shape, leaf.dtype), tree)


def build(mesh: Mesh, f: Any, *given: Any) -> tuple[Any, float]:
    """Returns a compiled program, and the processor time to lower and compile it."""
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        traced, start = jax.jit(f).trace(*given), time.process_time()
        # Without autotuning of convolutions, which needs a GPU.
        program = traced.lower().compile(compiler_options={"xla_gpu_autotune_level": "0"})
        return program, time.process_time() - start


# ---------------------------------------------------------------------- what a program moves
#
# On a GPU every operation of the entry computation that is not a mere view is a kernel: it
# reads each operand from memory once (or slices of it), and writes its result there. The count
# ignores caches and access patterns that waste bandwidth. JAX's `cost_analysis()` (0.12.0.1)
# needs a GPU; on a CPU it counts this package's kernel as nothing, and an operand that an
# operation reads in two places twice.

_VIEWS = {"bitcast", "constant", "get-tuple-element", "opt-barrier", "parameter", "tuple"}
_SLICES = {"dynamic-slice", "gather", "slice"}
_ONE_TO_ONE = {"bitcast", "convert", "copy", "reshape", "transpose"}
_UNCOUNTED = re.compile("call|while|conditional|.*-(start|done|update)")
_COLLECTIVE = re.compile(
    "(all-(gather|reduce|to-all)|collective-permute|reduce-scatter)(-start)?"
)
# A tuple's type is in parentheses, an operand is "%name" or "type %name".
_LINE = re.compile(r"\s+(?:ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*?)\)(.*)")


class Op(NamedTuple):
    """Holds a line of optimised HLO: `%name = type opcode(%operands...), attributes`."""

    opcode: str
    operands: list[str]
    attributes: str  # of a parameter: its position
    bytes: int  # of the result
    elements: int  # of the largest array in it


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
            types = re.findall(r"\b(?:pred|[a-z]+(\d+)\w*)\[([\d,]*)\]", type_)
            sizes = [math.prod(map(int, re.findall(r"\d+", shape))) for _, shape in types]
            bits = sum(n * int(each or 8) for n, (each, _) in zip(sizes, types, strict=True))
            operands, largest = re.findall(r"%([\w.-]+)", inside), max(sizes, default=0)
            current[name] = Op(opcode, operands, attributes, bits // 8, largest)
    return computations


def launches(text: str) -> dict[str, int]:
    """Returns the bytes that each operation of a program moves on the device."""
    computations, moved = parse(text), {}
    for name, op in computations["ENTRY"].items():
        if _UNCOUNTED.fullmatch(op.opcode):  # its traffic is not in the text
            raise NotImplementedError(f"%{name} = {op.opcode}(...) is not counted")
        called = re.search(r"\bcalls=%?([\w.-]+)", op.attributes)
        body = computations[called[1]] if called else {}
        places = {o.attributes: inside for inside, o in body.items() if o.opcode == "parameter"}
        read: dict[str, int] = {}
        for position, operand in enumerate(op.operands):
            while computations["ENTRY"][operand].opcode == "bitcast":  # the same memory
                (operand,) = computations["ENTRY"][operand].operands
            size = computations["ENTRY"][operand].bytes
            if inside := places.get(str(position)):
                size = min(size, size * _demanded(body, inside) // body[inside].elements)
            read[operand] = max(size, read.get(operand, 0))
        if op.opcode not in _VIEWS:
            moved[name] = sum(read.values()) + op.bytes
    return moved


def _demanded(body: dict[str, Op], value: str) -> int:
    """Returns how many elements of a value its users in a fusion read."""
    users = {name: op for name, op in body.items() if value in op.operands}
    if not users or {op.opcode for op in users.values()} - _SLICES - _ONE_TO_ONE:
        return body[value].elements
    asked = {name: _demanded(body, name) for name in users}
    asked |= {name: op.elements for name, op in users.items() if op.opcode in _SLICES}
    return sum(asked.values())


def count(mesh: Mesh, program: str, shape: Any, direction: str, name: str, dtype: str) -> Row:
    """Compiles a norm and its activation, and returns the bytes moved, in units of x."""
    case = dict(zip(CASE, (program, shape, direction, name, dtype), strict=True))
    channels, conv, key = shape[1], eqx.nn.Identity(), jax.random.key(0)
    affine = (jnp.ones(channels), jnp.ones(channels))
    if program == BETWEEN:
        conv = eqx.nn.Conv2d(channels, channels, 3, padding=1, dtype=dtype, key=key)
    if program == LAYER_NORM:
        norm = peers.layer_norm(name, shape[1:], eps=EPS)
    elif name == NO_NORM:
        relu: Any = lambda affine, memory, x: (jax.nn.relu(x), memory)  # noqa: E731
        norm = peers.Layer((), relu, relu)
    else:
        how: Any = {"momentum": 0.99, "eps": EPS, "activation": ALONE.get(program, jax.nn.relu)}
        norm = peers.batch_norm(name, channels, **how)

    def train(parameters: Any, memory: Any, x: Any) -> Any:
        before, affine, after = parameters
        y, memory = norm.train(affine, memory, jax.vmap(before)(x))
        return jax.vmap(after)(y), memory

    made, x = norm._replace(train=train), jax.ShapeDtypeStruct(shape, dtype)
    f = train if direction == FORWARD else peers.forward_and_backward(made, direction == APART)
    given = [(conv, affine, conv), norm.memory, *[x] * (1 if direction == FORWARD else 2)]
    text = build(mesh, f, *like(given, mesh))[0].as_text()
    moved = launches(text)
    units = sum(moved.values()) / (x.size * x.dtype.itemsize)
    counts = {"launches": len(moved), "scatters": text.count(" scatter(")}
    return {**case, "units": units, **counts}


def with_norm(layer: str, dtype: str, **how: Any) -> Any:
    """Returns a function of a number of channels that makes a batch norm."""
    if layer == OURS:
        return functools.partial(BatchNorm, approach="batch", **how)
    return functools.partial(eqx.nn.BatchNorm, mode="batch", dtype=jnp.dtype(dtype), **how)


def send(mesh: Mesh, dtype: str, way: str, layer: str) -> Row:
    """Compiles a training step over several devices, and returns its collectives."""
    axis, split = "batch" if way == JIT else ("batch", "devices"), jax.P("devices")
    norm, state = eqx.nn.make_with_state(with_norm(layer, dtype, axis_name=axis))(CHANNELS)
    weights, static = eqx.partition(norm, eqx.is_array)

    def forward(weights: Any, state: Any, x: Any) -> Any:
        return jax.vmap(eqx.combine(weights, static), **MAPPED)(x, state)

    if way == SHARD_MAP:
        specs: Any = {"in_specs": (jax.P(), jax.P(), split), "out_specs": (split, jax.P())}
        forward = jax.shard_map(forward, mesh=mesh, **specs)

    def step(weights: Any, state: Any, x: Any, dy: Any) -> Any:
        y, back, state = jax.vjp(lambda w, x: forward(w, state, x), weights, x, has_aux=True)
        return y, back(dy), state

    x = like(jax.ShapeDtypeStruct((64 * COUNT, CHANNELS, 28, 28), dtype), mesh, "devices")
    text = build(mesh, step, *like((weights, state), mesh), x, x)[0].as_text()
    ops = [op for computation in parse(text).values() for op in computation.values()]
    found = [op for op in ops if _COLLECTIVE.fullmatch(op.opcode)]
    said = ", ".join(f"{op.opcode.removesuffix('-start')} {op.elements}" for op in found)
    row = {"way": way, "layer": layer, "dtype": dtype, "collectives": said}
    return {**row, "sends": len(found), "largest": max(op.elements for op in found)}


def train(mesh: Mesh, dtype: str, layer: str, recomputes: bool) -> Row:
    """Compiles a step of ResNet-50 on 32 images; returns the memory of JAX and XLA, in MB."""
    make = eqx.nn.make_with_state(training.resnet_50)
    model, state = make(with_norm(layer, dtype, axis_name="batch"), jnp.dtype(dtype))
    weights, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(weights: Any, state: Any, x: Any, labels: Any) -> Any:
        y, state = jax.vmap(eqx.combine(weights, static), **MAPPED)(x, state)
        picked = jnp.take_along_axis(jax.nn.log_softmax(y), labels[:, None], axis=1)
        return -picked.astype(jnp.float32).mean(), state

    f = jax.checkpoint(loss, policy=recompute_outputs) if recomputes else loss

    def step(weights: Any, *rest: Any) -> Any:
        value, gradients = jax.value_and_grad(f, has_aux=True)(weights, *rest)
        return jax.tree.map(lambda w, g: w - 0.1 * g.astype(w.dtype), weights, gradients), value

    x = jax.ShapeDtypeStruct((32, 3, 224, 224), jnp.dtype(dtype))
    given = weights, state, x, jax.ShapeDtypeStruct((32,), jnp.int32)
    kept = jax.eval_shape(lambda w, *r: jax.vjp(lambda w: f(w, *r), w, has_aux=True)[1], *given)
    program, seconds = build(mesh, step, *like(given, mesh))
    row = {"layer": layer, "dtype": dtype, "recomputes": recomputes}
    row["kept"] = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kept)) / 1e6
    row["temporaries"] = program.memory_analysis().temp_size_in_bytes / 1e6
    row["moved"] = sum(launches(program.as_text()).values()) / 1e6
    return {**row, "seconds": seconds}  # of the processor, to lower and compile


# --------------------------------------------------------------------------------- verdicts

# 0.2 are for partial sums. For the statistics the kernel reads x once, XLA twice; but the
# kernel needs columns, so an image is written first. 5 (25.1 without a norm) and 6 are counts.
MOST = {
    "1. by XLA: at most 8.2 times x's bytes": (ALONE, (DENSE, IMAGES), (BOTH,), (OURS,), 8.2),
    "2. by Pallas, on columns: at most 7.2": (ALONE, (DENSE,), (BOTH,), (OURS_PALLAS,), 7.2),
    "3. by Pallas, on images: at most 9.2": (ALONE, (IMAGES,), (BOTH,), (OURS_PALLAS,), 9.2),
    "4. by Pallas, forward: at most 3.06": (ALONE, COLUMNS, (FORWARD,), (OURS_PALLAS,), 3.06),
    "5. between convolutions: at most 30.3": ((BETWEEN,), (IMAGES,), (BOTH,), LAYERS[:3], 30.3),
    "6. LayerNorm, by XLA: at most 8.3": ((LAYER_NORM,), (DENSE,), (BOTH,), (OURS,), 8.3),
}


def moves_little(rows: list[Row]) -> list[report.Verdict]:
    """Judges each claim of `MOST` for which there are programs."""
    verdicts = []
    for claim, (*case, most) in MOST.items():
        where = dict(zip(CASE[:4], case, strict=True))
        chosen = [row for row in rows if all(row[key] in where[key] for key in where)]
        if found := [row["units"] for row in chosen]:
            measured = f"{max(found):.2f}, of {len(found)} programs"
            verdicts.append((claim, measured, max(found) <= most))
    return verdicts


def kernels_are_clean(folder: Path) -> report.Verdict:
    """Judges jaxlib's dumps of this package's kernels: PTX, and the assembler's messages."""
    wrong = re.compile(r"\b[1-9]\d* bytes spill|\b(atom|red)\.")
    ptx = {path: wrong.search(path.read_text()) for path in folder.glob("eqx_norm_*.ptx*")}
    measured = f"{sum(map(bool, ptx.values()))} of {len(ptx) // 2} kernels"
    return "9. no kernel spills registers or adds atomically", measured, not any(ptx.values())


def scatters_nothing(rows: list[Row]) -> report.Verdict:
    claim = "8. no program has a scatter, which by default adds atomically on a GPU"
    number = sum(row["scatters"] > 0 for row in rows)
    return claim, f"{number} of {len(rows)} programs", number == 0


def sends_little(rows: list[Row]) -> report.Verdict:
    most = {JIT: 4, SHARD_MAP: 2}  # Equinox's layer sends 4 times, too
    ours = [row for row in rows if row["layer"] == OURS]
    few = all(row["sends"] <= most[row["way"]] for row in ours)
    largest = max(row["largest"] for row in ours)
    claim = "7. a step sends only vectors, at most 2 under shard_map and 4 under jit"
    measured = f"{[row['sends'] for row in ours]}; {largest} numbers to a device"
    return claim, measured, few and largest <= 4 * COUNT * CHANNELS


def shares(rows: list[Row], field: str, recomputes: bool, of: str = OURS) -> list[float]:
    """Returns a step's need relative to one with the layer `of`, for each dtype."""
    need = {(row["layer"], row["recomputes"], row["dtype"]): row[field] for row in rows}
    return [need[OURS, recomputes, dtype] / need[of, False, dtype] for dtype in DTYPES]


def recomputing_saves(rows: list[Row]) -> report.Verdict:
    most = {"kept": 0.4, "temporaries": 0.75, "moved": 1.15}
    found = {field: max(shares(rows, field, True)) for field in most}
    claim = "10. recompute_outputs: at most 0.4 kept, 0.75 temporaries, 1.15 moved"
    measured = ", ".join(f"{field} {value:.2f}" for field, value in found.items())
    return claim, measured, all(found[field] <= most[field] for field in most)


def main() -> int:
    options = report.parser("compiled", __doc__, "few programs, no ResNet").parse_args()
    if importlib.util.find_spec("jax_cuda12_plugin") is None:
        raise report.UserError("jax's CUDA plugin is missing: run make gpu-compile-check")
    jax.config.update("jax_platforms", "cpu")  # otherwise jax looks for a GPU and fails
    every = dict.fromkeys(case for grid in GRIDS for case in itertools.product(*grid))
    ways = [*itertools.product(DTYPES, ((JIT, OURS), (SHARD_MAP, OURS), (JIT, EQUINOX)))]
    nets = [*itertools.product(DTYPES, ((OURS, False), (OURS, True), (EQUINOX, False)))]
    if options.quick:
        every, nets = list(every)[:4], []
    with report.unfinished(options.out) as folder, tempfile.TemporaryDirectory() as code:
        # jaxlib dumps its kernels, and complains that it has no disassembler.
        os.environ["MOSAIC_GPU_DUMP_TO"] = code
        sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        one, several = mesh_of(1), mesh_of(COUNT)
        programs = [count(one, *case) for case in tqdm(every, disable=None)]
        sent = [send(several, dtype, *way) for dtype, way in tqdm(ways, disable=None)]
        steps = [train(one, dtype, *net) for dtype, net in tqdm(nets, disable=None)]
        verdicts, goals, tables = moves_little(programs), [], []
        verdicts += [sends_little(sent), scatters_nothing(programs)]
        if any(Path(code).glob("*.ptxas")):
            verdicts.append(kernels_are_clean(Path(code)))
        else:
            print("this jaxlib does not dump its kernels: claim 9 is left out")
        if steps:
            verdicts.append(recomputing_saves(steps))
            found = shares(steps, "temporaries", True), shares(steps, "seconds", False, EQUINOX)
            kept, time_ = (f"{bfloat16:.2f}, {float32:.2f}" for bfloat16, float32 in found)
            limits = "convolutions' outputs alone are 0.51", "more operations, larger fusions"
            goals.append(("recompute_outputs: 0.6 of XLA's temporary memory", kept, limits[0]))
            goals.append(("ResNet-50: at most 1.2 of Equinox's compile time", time_, limits[1]))
        made = {"programs": programs, "devices": sent} | ({"memory": steps} if steps else {})
        for name, rows in made.items():
            hidden = {FORWARD, APART, "float32"} if rows is programs else set()
            lines = [[*row.values()] for row in rows]
            report.save_csv(folder / "results" / f"compiled_{name}.csv", list(rows[0]), lines)
            shown = [line for line in lines if not hidden & {*line}]
            tables.append(report.table([UNITS.get(name, name) for name in rows[0]], shown))
        about = {**report.environment("jax-cuda12-plugin"), "device": "an H200, not there"}
        fail = report.publish(
            folder,
            "compiled",
            asked="How many bytes do the layers move on a GPU?",
            answer=f"forward and backward: {programs[0]['units']:.1f} times the bytes of x",
            tables=tables,
            verdicts=verdicts,
            goals=goals,
            environment=about,
        )
    return int(options.quick and fail > 0)


if __name__ == "__main__":
    with report.trouble("compiled"):
        sys.exit(main())
