"""Measures the errors of layer norm and its gradients: this package, Equinox, Flax, PyTorch.

    python -m experiments.layer_norm           about a minute on 2 cores
    python -m experiments.layer_norm --quick   under 30 seconds; fails if a claim fails

(a) For the pair of OneFlow issue #6149, [-1.83965693, -1.82964566] at eps = 1e-5: the output,
    and the gradient of the output's sum, which is exactly 0. Then for pairs with the same
    distance at other means.
(b) For shapes of 1 to 4 dimensions in float32, float64 and bfloat16: the gradients of weight
and
    bias, with and without either, compared with extended precision. OneFlow had exchanged them,
    so "exchanged" shows the errors of that mistake.

https://github.com/Oneflow-Inc/oneflow/issues/6149
"""

import dataclasses
import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from tqdm import tqdm

from tests import exact
from tests.exact import Batch

from .common import peers, report
from .common.peers import EQUINOX, FLAX, FLAX_TWO_PASS, OURS, TORCH
from .common.report import Verdict

LAYERS = OURS, EQUINOX, FLAX, FLAX_TWO_PASS, TORCH
PAIR = (-1.83965693, -1.82964566)
MEANS = np.geomspace(0.01, 1e4, 61)  # of pairs with the same distance
DTYPES = ("float32", "float64", "bfloat16")
AFFINE = ((True, True), (True, False), (False, True))  # with weight, with bias
EXCHANGED = "exchanged"  # the exact answer with dweight and dbias exchanged


@dataclasses.dataclass(frozen=True)
class Settings:
    layers: tuple[str, ...] = LAYERS
    dimensions: tuple[int, ...] = (1, 2, 3, 4)  # of an example


QUICK = Settings(LAYERS[:2], (1, 2))  # layers of the packages that this one requires

# ------------------------------------------------------------------------------ measurement


class Pair(NamedTuple):
    """Holds a layer's answer for a pair whose output is summed."""

    dtype: str
    layer: str
    mean: float  # of the pair
    y: float  # for the second value; for the first it is the negative
    error: float  # of y, the larger of two
    dx: float  # the larger of two; exactly 0


class Gradients(NamedTuple):
    """Holds the errors of the gradients, as in `exact.Errors`."""

    dtype: str
    shape: tuple[int, ...]  # of an example
    layer: str
    dweight: float  # NaN without a weight
    dbias: float
    dx: float


def pairs(layers: Sequence[str], dtype: str, x: Any) -> Iterator[Pair]:
    """Yields the layers' answers for pairs, [N, 2]."""
    x = np.asarray(x, dtype)
    batch = Batch(x, np.ones_like(x), None, None)
    right = exact.layer_norm(batch).answer.y
    for layer in layers:
        gave = peers.answer_of_layer_norm(layer, batch)
        error, dx = np.abs(gave.y - right).max(1), np.abs(gave.dx).max(1)
        columns = x.astype(float).mean(1), gave.y[:, 1], error, dx
        for mean, *numbers in zip(*columns, strict=True):
            yield Pair(dtype, layer, mean, *numbers)


def batches(dtype: str, dimensions: Iterable[int]) -> Iterator[Batch]:
    """Yields batches of random shapes: for each rank with weight, bias or both."""
    for rank, (with_weight, with_bias) in itertools.product(dimensions, AFFINE):
        random = np.random.RandomState([rank, with_weight, with_bias])
        shape = tuple(random.randint(2, 13 if rank < 3 else 7, rank))
        examples = random.randint(2, 9)
        mean, std = random.uniform(-30, 30), 10 ** random.uniform(-1, 1)
        x = mean + std * random.standard_normal((examples, *shape))
        dy = random.standard_normal(x.shape)
        wide = np.float64 if dtype == "float64" else np.float32
        weight = random.uniform(0.5, 1.5, shape).astype(wide)
        bias = random.uniform(-1, 1, shape).astype(wide)
        x, dy = (values.astype(jnp.dtype(dtype)) for values in (x, dy))
        yield Batch(x, dy, weight if with_weight else None, bias if with_bias else None)


def gradients(settings: Settings) -> Iterator[Gradients]:
    """Yields the errors of the layers, and of the exchanged gradients."""
    given = [(d, batch) for d in DTYPES for batch in batches(d, settings.dimensions)]
    for dtype, batch in tqdm(given, desc="gradients", unit="batch", disable=None):
        right = exact.layer_norm(batch)
        gave = {layer: peers.answer_of_layer_norm(layer, batch) for layer in settings.layers}
        dweight, dbias = right.answer.dbias, right.answer.dweight  # the bug of the issue
        gave[EXCHANGED] = right.answer._replace(
            dweight=None if batch.weight is None else dweight,
            dbias=None if batch.bias is None else dbias,
        )
        for layer, answer in gave.items():
            off = exact.errors(batch, right, answer)
            yield Gradients(dtype, batch.x.shape[1:], layer, off.dweight, off.dbias, off.dx)


# --------------------------------------------------------------------------------- verdicts

# The bounds are a few roundings of float32; float64 has 29 bits more.
SCALE = {"float32": 1.0, "bfloat16": 1.0, "float64": 2.0**-29}


def within(rows: Sequence[Any], claim: str, quantity: str, bound: float) -> Verdict:
    """Judges whether this package's errors are within the bound, in each dtype."""
    worst: dict[str, float] = {}
    for row in rows:
        error = getattr(row, quantity)
        if row.layer == OURS and not np.isnan(error):  # NaN: without weight or bias
            worst[row.dtype] = max(error, worst.get(row.dtype, 0))
    holds = all(error <= bound * SCALE[dtype] for dtype, error in worst.items())
    return claim, ", ".join(f"{error:.2g} ({dtype})" for dtype, error in worst.items()), holds


def told_apart(rows: Sequence[Gradients]) -> Verdict:
    """Judges whether the errors show that dweight and dbias are not exchanged."""
    ours, others = (
        [(row.dweight, row.dbias) for row in rows if row.layer == layer]
        for layer in (OURS, EXCHANGED)
    )
    most, least = np.nanmax(ours), np.nanmin(others)
    measured = f"errors up to {most:.1e}; exchanged, from {least:.1e}"
    return "6. dweight and dbias are not exchanged", measured, bool(most < 0.01 * least)


def judge(pair: Sequence[Pair], found: Sequence[Gradients]) -> list[Verdict]:
    """Returns the verdicts on this package's layer norm."""
    dweight = "3. error of dweight <= 1e-7 sum abs(dy) (1 + 4.3 abs(xhat))"
    return [
        within(pair, "1. OneFlow's pair gives 0.8454, to 1e-6", "error", 1e-6),
        within(pair, "2. the gradient of the sum of its output is exactly 0", "dx", 0),
        within(found, dweight, "dweight", 1e-7),
        within(found, "4. error of dbias <= 2e-7 sum abs(dy)", "dbias", 2e-7),
        within(found, "5. error of dx <= 1e-6 max abs(dy weight) / std", "dx", 1e-6),
        told_apart(found),
    ]


# ------------------------------------------------------------------------ tables and figure


def tables(pair: Sequence[Pair], found: Sequence[Gradients]) -> list[str]:
    """Returns tables of the answers for the pair, and of the gradients' largest errors."""
    header = ("dtype", "layer", "output", "its error", "gradient of the sum")
    lines = [(r.dtype, r.layer, f"{r.y:.7f}", f"{r.error:.1e}", f"{r.dx:.1e}") for r in pair]
    layers = list(dict.fromkeys(row.layer for row in found))

    def worst(dtype: str, quantity: str, layer: str) -> str:
        errors = [getattr(r, quantity) for r in found if (r.dtype, r.layer) == (dtype, layer)]
        return f"{np.nanmax(errors):.1e}"

    of_gradients = [
        (f"{quantity}, {dtype}", *(worst(dtype, quantity, layer) for layer in layers))
        for dtype, quantity in itertools.product(DTYPES, ("dweight", "dbias", "dx"))
    ]
    return [report.table(header, lines), report.table(("largest error", *layers), of_gradients)]


STYLE: dict[str, dict[str, Any]] = {
    EQUINOX: {"linewidth": 2.6, "alpha": 0.6},
    FLAX: {"linestyle": "--"},
    FLAX_TWO_PASS: {"linestyle": "-."},
    TORCH: {"linestyle": ":", "linewidth": 2},
    OURS: {"linewidth": 2.4, "marker": "o", "markersize": 3},
}
ZERO = 1e-8  # 0 is drawn here, because a logarithmic axis has no 0


def draw(found: Sequence[Pair]) -> Figure:
    """Draws the errors for pairs by their distance from zero."""
    figure = report.figure(10, 4.2)
    distance = -float(np.mean(PAIR))
    for axes, quantity, title in zip(
        figure.subplots(1, 2),
        ("error", "dx"),
        ("Error of the output", "Input gradient of the sum of the output (0 is right)"),
        strict=True,
    ):
        for layer, style in STYLE.items():
            values = [getattr(row, quantity) for row in found if row.layer == layer]
            if values:
                values = np.clip(np.nan_to_num(values, nan=np.inf), ZERO, 1e4)
                axes.plot(MEANS, values, label=layer, color=peers.COLOURS[layer], **style)
        axes.axvline(distance, color=report.BLACK, linewidth=0.8, linestyle=(0, (6, 3)))
        place = {"transform": axes.get_xaxis_transform(), "va": "top", "fontsize": 8}
        axes.text(1.1 * distance, 0.99, "the pair of the issue", **place)
        axes.set(xscale="log", yscale="log", xlabel="distance of the pair from zero")
        ticks = {ZERO: "0", **{10.0**k: f"$10^{{{k}}}$" for k in range(-7, 5, 2)}}
        axes.set_yticks([*ticks], [*ticks.values()])
        axes.minorticks_off()
        axes.set_title(title)
    figure.axes[0].legend(loc="upper left")
    figure.suptitle(
        "Layer norm in float32 of two values as close together as OneFlow's pair (0.01 apart)"
    )
    return figure


# ------------------------------------------------------------------------------ the command


def main() -> int:
    about = "1 and 2 dimensions, the layers in JAX"
    options = report.parser("layer_norm", __doc__, about).parse_args()
    settings = QUICK if options.quick else Settings()
    settings = dataclasses.replace(settings, layers=peers.present(settings.layers))
    layers, half = settings.layers, (PAIR[1] - PAIR[0]) / 2
    pair = [row for dtype in DTYPES[:2] for row in pairs(layers, dtype, [PAIR])]
    means = list(pairs(layers, "float32", np.stack([MEANS - half, MEANS + half], axis=1)))
    found = list(gradients(settings))
    with report.unfinished(options.out) as folder:
        files = {"pair": pair, "means": means, "gradients": found}
        for name, rows in files.items():
            # Nine digits, which float32 has: y is a value, not an error.
            path = folder / "results" / f"layer_norm_{name}.csv"
            report.save_csv(path, rows[0]._fields, rows, digits=9)
        report.save_figure(folder, "layer_norm", draw(means))
        single = [f"{row.layer} {row.y:.7f}" for row in pair if row.dtype == "float32"]
        fail = report.publish(
            folder,
            "layer_norm",
            asked="Are layer norm and its gradients right? "
            "[OneFlow #6149](https://github.com/Oneflow-Inc/oneflow/issues/6149)",
            answer=f"the pair in float32 (exact: 0.8454272): {', '.join(single)}",
            tables=tables(pair, found),
            verdicts=judge(pair, found),
            settings=dataclasses.asdict(settings),
        )
    return int(options.quick and fail > 0)


if __name__ == "__main__":
    with report.trouble("layer_norm"):
        sys.exit(main())
