"""What a GPU would have to move: the layer, compiled for an H200 that is not there.

    make gpu-compile-check                     everything, in an environment of its own: 1 GB
    python -m experiments.gpu_compile          the same, where the CUDA plugin is installed
    python -m experiments.gpu_compile --quick  only what is asserted

Batch normalisation does little arithmetic; its time on a GPU is the time to move its arrays
between memory and processor. How much it moves can be read off the optimised program, which
XLA makes for a GPU from its description. The unit is the bytes of x. In training, the least is
2 reads and 1 write forward, 4 reads and 1 write backward: 8 units.

Two questions are answered, in bfloat16 and float32:

1. How many units do norm and ReLU move, state update included, forward and with the gradients
   of x, weight and bias? For this layer at most 9.1, on dense and on convolutional input.
   Where y and its cotangent are known at once, XLA writes y in the pass that makes the sums of
   the backward pass, which saves a read of x. In training the cotangent comes later: "forward,
   then backward" keeps the two apart.
2. Between two convolutions, which XLA gives another memory layout than the caller does, does
   the layer force arrays back into the caller's layout? There must be no more copies and
   transposes of the size of x than without the layer.

It exits with 1 where an answer is not as stated. Nothing runs, so nothing is timed.
"""

import argparse
import csv
import dataclasses
import functools
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
from jax.experimental import topologies
from jaxtyping import Array

from eqx_norm import BatchNorm

from . import gpu_targets, hlo_traffic, results

AXIS = "batch"
TARGET = "NVIDIA H200 (compiled for, not run on)"
PLUGIN = ("jax-cuda12-plugin", "jax-cuda12-pjrt", "nvidia-cuda-nvcc-cu12")

# Plain XLA with two-pass statistics moves 9: x for the mean, x for the variance, x and y; then
# x and dy for the sums, x, dy and dx. The tenth of a unit is for partial sums.
MOST_UNITS = 9.1

# From layer, state and x to y and the new state.
Apply = Callable[[eqx.Module, eqx.nn.State, Array], tuple[Array, eqx.nn.State]]
Made = tuple[eqx.Module, eqx.nn.State]


class Implementation(NamedTuple):
    """Makes layer and state for so many channels, and applies them with ReLU.

    The parameters are float32, as they are unless one says otherwise, also for an input in
    bfloat16; the output has the dtype of the input.
    """

    make: Callable[[int], Made]
    apply: Apply


def _over_batch(layer: Any, state: eqx.nn.State, x: Array) -> tuple[Array, eqx.nn.State]:
    mapped = jax.vmap(layer, axis_name=AXIS, in_axes=(0, None), out_axes=(0, None))
    return mapped(x, state)


def _then_relu(layer: Any, state: eqx.nn.State, x: Array) -> tuple[Array, eqx.nn.State]:
    y, state = _over_batch(layer, state, x)
    return jax.nn.relu(y).astype(x.dtype), state


def _ours(channels: int, **keywords: Any) -> Made:
    make = eqx.nn.make_with_state(BatchNorm)
    return make(channels, AXIS, approach="batch", **keywords)


def _ours_with_relu(channels: int) -> Made:
    return _ours(channels, activation=jax.nn.relu)


def _equinox(mode: Any) -> Callable[[int], Made]:
    make = eqx.nn.make_with_state(eqx.nn.BatchNorm)
    return lambda channels: make(channels, AXIS, mode=mode)


OURS = "eqx_norm"
IMPLEMENTATIONS = {
    OURS: Implementation(_ours_with_relu, _over_batch),
    "eqx_norm, relu after": Implementation(_ours, _then_relu),
    "equinox, batch": Implementation(_equinox("batch"), _then_relu),
    "equinox, ema": Implementation(_equinox("ema"), _then_relu),
}
NO_NORM = "no norm"

SHAPES = {"dense": (65536, 256), "convolutional": (64, 64, 32, 32)}
DTYPES = ("bfloat16", "float32")
HOLDS = "as stated"


@dataclasses.dataclass(frozen=True)
class Row:
    """One compiled program, or why there is none."""

    program: str
    implementation: str
    shape: tuple[int, ...]
    dtype: str
    direction: str
    units: float | None
    layout_changes: int | None
    failure: str = ""
    verdict: str = ""  # only where something is asserted

    @property
    def problem(self) -> bool:
        return self.verdict not in ("", HOLDS)


Compile = Callable[..., str]


def compiler(target: str) -> Compile:
    """Gives `compile(f, *arguments)`: the optimised HLO of `f`, for a GPU that is not there.

    Of the arguments, only shapes and dtypes matter.
    """
    # With the plugin installed jax would look for a GPU, and fail where there is no driver.
    # Nothing is run here but on the CPU.
    jax.config.update("jax_platforms", "cpu")
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=target, topology="1x1x1"
    )
    mesh = jax.sharding.Mesh(
        topology.devices, ("device",), axis_types=(jax.sharding.AxisType.Auto,)
    )
    on_it = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def compile_(f: Callable[..., Any], *arguments: Any) -> str:
        described = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=on_it), arguments
        )
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            lowered = jax.jit(f).lower(*described)
        # Choosing among algorithms for a convolution means timing them, which needs a GPU.
        compiled = lowered.compile(compiler_options={"xla_gpu_autotune_level": "0"})
        return compiled.as_text() or ""

    return compile_


# Programs of (layer, state, x, dy).
Program = Callable[[Any, eqx.nn.State, Array, Array], Any]


def forward(apply: Apply) -> Program:
    """To y and the new state."""
    return lambda layer, state, x, dy: apply(layer, state, x)


def both(apply: Apply, *, apart: bool = False) -> Program:
    """To y, the new state, and the gradients of parameters and x."""

    def program(layer: Any, state: eqx.nn.State, x: Array, dy: Array) -> Any:
        parameters, rest = eqx.partition(layer, eqx.is_inexact_array)

        def f(parameters: Any, x: Array) -> tuple[Array, eqx.nn.State]:
            return apply(eqx.combine(parameters, rest), state, x)

        y, transposed, state = jax.vjp(f, parameters, x, has_aux=True)
        if apart:  # dy is not there before y is
            y, dy = jax.lax.optimization_barrier((y, dy))
        return y, state, transposed(dy)

    return program


BOTH = "forward + backward"
DIRECTIONS: dict[str, Callable[[Apply], Program]] = {
    "forward": forward,
    BOTH: both,
    "forward, then backward": functools.partial(both, apart=True),
}


class Between(eqx.Module):
    """A convolution, the layer or only ReLU, a convolution."""

    before: eqx.nn.Conv2d
    norm: eqx.Module | None
    after: eqx.nn.Conv2d


def _between(name: str, channels: int, dtype: Any) -> tuple[Between, eqx.nn.State, Apply]:
    keys = jax.random.split(jax.random.key(0), 2)
    before, after = (
        eqx.nn.Conv2d(channels, channels, 3, padding=1, key=key, dtype=dtype) for key in keys
    )
    if name == NO_NORM:
        norm, state = None, eqx.nn.State(None)
    else:
        norm, state = IMPLEMENTATIONS[name].make(channels)

    def apply(layer: Any, state: eqx.nn.State, x: Array) -> tuple[Array, eqx.nn.State]:
        x = jax.vmap(layer.before)(x)
        if name == NO_NORM:
            x = jax.nn.relu(x)
        else:
            x, state = IMPLEMENTATIONS[name].apply(layer.norm, state, x)
        return jax.vmap(layer.after)(x), state

    return Between(before, norm, after), state, apply


def measure_layer(compile_: Compile, name: str, shape: str, dtype: str, direction: str) -> Row:
    x = jax.ShapeDtypeStruct(SHAPES[shape], dtype)

    def program() -> str:
        layer, state = IMPLEMENTATIONS[name].make(x.shape[1])
        return _compiled(compile_, direction, IMPLEMENTATIONS[name].apply, layer, state, x)

    row = _measured(program, x, f"norm + relu, {shape}", name, direction)
    if name != OURS or direction != BOTH:
        return row
    assert row.units is not None
    too_many = row.units > MOST_UNITS
    verdict = f"more than {MOST_UNITS} units" if too_many else HOLDS
    return dataclasses.replace(row, verdict=verdict)


def measure_between(compile_: Compile, name: str, dtype: str, most: int | None) -> Row:
    """`most` are the layout changes that there are without a layer, once that is known."""
    x = jax.ShapeDtypeStruct(SHAPES["convolutional"], dtype)

    def program() -> str:
        layer, state, apply = _between(name, x.shape[1], x.dtype)
        return _compiled(compile_, BOTH, apply, layer, state, x)

    row = _measured(program, x, "conv, norm + relu, conv", name, BOTH)
    if name != OURS:
        return row
    assert row.layout_changes is not None
    assert most is not None
    verdict = "adds copies or transposes" if row.layout_changes > most else HOLDS
    return dataclasses.replace(row, verdict=verdict)


def _compiled(
    compile_: Compile,
    direction: str,
    apply: Apply,
    layer: eqx.Module,
    state: eqx.nn.State,
    x: jax.ShapeDtypeStruct,
) -> str:
    # What is no array, as the function of an activation, is not an argument of a program.
    arrays, static = eqx.partition(layer, eqx.is_array)
    f = DIRECTIONS[direction](apply)
    return compile_(
        lambda arrays, *rest: f(eqx.combine(arrays, static), *rest), arrays, state, x, x
    )


def _measured(
    program: Callable[[], str],
    x: jax.ShapeDtypeStruct,
    what: str,
    implementation: str,
    direction: str,
) -> Row:
    row = Row(what, implementation, x.shape, x.dtype.name, direction, None, None)
    try:
        text = program()
    except TypeError as error:
        if implementation == OURS:
            raise
        # mode="ema" of Equinox mixes dtypes where input and parameters do not have the same.
        return dataclasses.replace(row, failure=type(error).__name__)
    return dataclasses.replace(
        row,
        units=hlo_traffic.units(text, x.size * x.dtype.itemsize),
        layout_changes=len(hlo_traffic.layout_changes(text, x.size)),
    )


def run(compile_: Compile, quick: bool) -> list[Row]:
    names = (OURS,) if quick else tuple(IMPLEMENTATIONS)
    directions = (BOTH,) if quick else tuple(DIRECTIONS)
    rows = [
        measure_layer(compile_, name, shape, dtype, direction)
        for shape in SHAPES
        for dtype in DTYPES
        for direction in directions
        for name in names
    ]
    for dtype in DTYPES:
        without = measure_between(compile_, NO_NORM, dtype, None)
        rows.append(without)
        rows += (measure_between(compile_, n, dtype, without.layout_changes) for n in names)
    return rows


def report(rows: Sequence[Row]) -> str:
    return results.table(
        (
            "program",
            "dtype",
            "direction",
            "implementation",
            "units of x",
            "layout changes",
            "verdict",
        ),
        [
            (
                row.program,
                row.dtype,
                row.direction,
                row.implementation,
                row.failure if row.units is None else f"{row.units:.2f}",
                "" if row.layout_changes is None else str(row.layout_changes),
                row.verdict.upper() if row.problem else row.verdict,
            )
            for row in rows
        ],
    )


def summary(path: Path) -> str:
    """The table of the README, from the committed results: forward + backward."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["direction"] == "forward + backward"]
    shown = {NO_NORM: "no norm", "eqx_norm": "eqx-norm", "equinox, batch": "Equinox, batch"}
    units = {
        (row["program"], row["dtype"], row["implementation"]): f"{float(row['units']):.1f}"
        for row in rows
        if row["units"]
    }
    programs = dict.fromkeys((row["program"], row["dtype"]) for row in rows)
    return results.table(
        ("compiled for an H200", "dtype", *(f"units of x, {name}" for name in shown.values())),
        [(*key, *(units.get((*key, name), "-") for name in shown)) for key in programs],
    )


def save(folder: Path, rows: Sequence[Row], seconds: float) -> None:
    header = [field.name for field in dataclasses.fields(Row)]
    cells = [dataclasses.asdict(row) for row in rows]
    for row in cells:
        row["shape"] = "x".join(map(str, row["shape"]))
        row["units"] = "" if row["units"] is None else f"{row['units']:.4f}"
    results.write_csv(
        folder / "gpu_compile.csv", header, [[row[name] for name in header] for row in cells]
    )
    environment = {**results.environment(*PLUGIN), "device": TARGET}
    results.write_json(
        folder / "gpu_compile.json",
        {
            "environment": environment,
            "most_units": MOST_UNITS,
            "problems": sum(row.problem for row in rows),
            "seconds": seconds,
        },
    )


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
    out: Path = options.out or (Path("build/gpu_compile") if options.quick else whole)
    folder = out / "results"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.exit(2, f"--out {out}: {folder} cannot be made ({error.strerror})\n")
    started = time.perf_counter()
    rows = run(compiler(gpu_targets.H200), options.quick)
    seconds = round(time.perf_counter() - started, 1)
    save(folder, rows, seconds)
    problems = sum(row.problem for row in rows)
    print(report(rows))
    print(f"\n{TARGET}; {problems} not as stated; in {seconds} s; results in {folder}")
    return int(problems > 0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.gpu_compile",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--quick", action="store_true", help="only this layer, forward and backward"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="writes DIR/results (default: experiments for the whole job, build/gpu_compile "
        "for --quick)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
