"""What the programs move when they are compiled for a GPU, and whether it is as stated."""

import dataclasses
from collections.abc import Callable

import equinox as eqx
import jax

from . import hlo_traffic
from .gpu_compiler import Compile
from .gpu_programs import BOTH, DIRECTIONS, IMPLEMENTATIONS, NO_NORM, OURS, Apply, between

# Plain XLA with two-pass statistics moves 9: x for the mean, x for the variance, x and y; then
# x and dy for the sums, x, dy and dx. The tenth of a unit is for partial sums.
MOST_UNITS = 9.1

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
        layer, state, apply = between(name, x.shape[1], x.dtype)
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
