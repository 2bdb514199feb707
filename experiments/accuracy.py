"""Measures errors of batch norm and layer norm: this package, Equinox, Flax and PyTorch.

    python -m experiments.accuracy           about a minute on 2 cores
    python -m experiments.accuracy --quick   under 30 seconds; fails if a claim fails

Every implementation is accurate at mean 0 and standard deviation 1. The batch norms here get
hard inputs, in one training step: constant channels
(https://github.com/BVLC/caffe/issues/3963), means much larger than the standard deviation, up
to a million values per channel, an outlier, and half precision.

Layer norm is given the pair of https://github.com/Oneflow-Inc/oneflow/issues/6149, pairs with
the same distance at other means, and examples of 1 to 4 axes. (OneFlow had exchanged the
gradients of weight and bias, which the claims on dweight and dbias would show.)

The exact answer is computed in extended precision. The claims name the units of the errors;
xhat is (x - mean) / std, and dy the gradient of y.

On a GPU only layers of this package are compared; the results are named after the device.
"""

import itertools
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike, NDArray

from .common import exact, machine, peers, report
from .common.exact import Batch, Errors, Exact
from .common.experiment import Experiment, Verdict
from .common.peers import EQUINOX, EQUINOX_BATCH, EQUINOX_EMA, FLAX, FLAX_TWO_PASS, OURS, TORCH
from .common.progress import progress, say
from .common.report import BLACK

BATCH_NORMS = OURS, EQUINOX_EMA, EQUINOX_BATCH, FLAX, FLAX_TWO_PASS, TORCH
LAYER_NORMS = OURS, EQUINOX, FLAX, FLAX_TWO_PASS, TORCH
# The layers on a GPU, and lengths of rows that their kernels serve, except in float64.
ON_GPU, SERVED = (OURS, peers.OURS_PALLAS), ((8,), (768,), (4, 256))


class Settings(NamedTuple):
    batch_norms: tuple[str, ...] = BATCH_NORMS
    layer_norms: tuple[str, ...] = LAYER_NORMS
    n: int = 10_000  # values per channel, by default
    most: int = 1_000_000  # values per channel, at most
    shapes: tuple[tuple[int, ...], ...] = ((7,), (5, 11), (3, 4, 6), (2, 5, 3, 4))  # of rows


# QUICK has fewer values, and only layers of the packages that this package requires.
QUICK = Settings(BATCH_NORMS[:3], LAYER_NORMS[:2], 1_000, 10_000, ((7,), (5, 11)))

CHANNELS = 8
DRAWS = 8  # the largest error counts: some errors occur in one channel of a hundred
CONSTANTS = (1e-3, 1.0, 1e3, 65504.0)  # bounds of ranges, up to the largest float16
SINGLE = "constant", "mean/std to 1e7", "affine", "n to 1e6", "outlier 1e6", "OneFlow's pair"
CONSTANT, RATIO, AFFINE, COUNT, OUTLIER, ONEFLOW = SINGLE
HALF = "float16", "bfloat16"
GROUPS = (*SINGLE, *HALF)
LAYER_NORM = {f"layer norm, {dtype}": dtype for dtype in ("float32", "float64", "bfloat16")}
FLOAT32, FLOAT64, BFLOAT16 = LAYER_NORM
DTYPES = {**dict(zip(HALF, HALF, strict=True)), **LAYER_NORM}  # float32 for other groups


class Case(NamedTuple):
    """Describes one kind of batch."""

    name: str
    group: str
    at: float  # its place on the axis of its group, or 0
    draw: Callable[[np.random.RandomState], NDArray]
    draws: int = 1
    affine: bool = False  # weight and bias at random, rather than 1 and 0

    def batch(self, number: int) -> Batch:
        """Returns a batch; OneFlow's has a gradient of ones."""
        # The seed depends on the case, so that a new case leaves other batches unchanged.
        random = np.random.RandomState([zlib.crc32(self.name.encode()), number])
        x = self.draw(random).astype(jnp.dtype(DTYPES.get(self.group, "float32")))
        dy = np.ones(x.shape) if self.group == ONEFLOW else random.standard_normal(x.shape)
        shape = x.shape[1:] if self.group in LAYER_NORM else x.shape[1:2]
        weight, bias = np.ones(shape), np.zeros(shape)
        if self.affine:
            weight, bias = random.uniform(0.5, 1.5, shape), random.uniform(-1, 1, shape)
        wide = np.result_type(x.dtype, np.float32)
        return Batch(x, dy.astype(x.dtype), weight.astype(wide), bias.astype(wide))


def cases(n: int, most: int) -> Iterator[Case]:
    """Yields the cases of batch norm, with `n` values per channel, and `most` at most."""
    for k, (low, high) in itertools.product((7, 121), itertools.pairwise(CONSTANTS)):
        drawn = partial(constant, k, low, high)
        yield Case(f"constants to {high:g}, n = {k}", CONSTANT, high, drawn)
    drawn = partial(constant, 9, 1e-3, 65504)
    yield Case("constants, n = 9, affine", CONSTANT, 0, drawn, affine=True)
    for k in range(8):
        yield Case(f"mean/std = 1e{k}", RATIO, 10**k, partial(far, n, 10.0**k), DRAWS)
    yield Case("mean/std = 1e3, affine", AFFINE, 1e3, partial(far, n, 1e3), DRAWS, affine=True)
    for k in (k for k in range(1, 7) if 10**k <= most):
        draws = min(max(80_000 // 10**k, 1), 64)  # small batches take no time
        yield Case(f"n = 1e{k}", COUNT, 10**k, partial(far, 10**k, 1e3), draws)
    yield Case("outlier first", OUTLIER, 0, partial(outlier, n, 0), DRAWS)
    yield Case("outlier elsewhere", OUTLIER, 0, partial(outlier, n, 7), DRAWS)
    yield Case("OneFlow's pair", ONEFLOW, 0, lambda _: np.c_[[-1.83965693, -1.82964566]])
    for dtype, mean, std in (("float16", 300, 1), ("float16", 0, 300), ("bfloat16", 100, 1)):
        drawn = partial(normal, n, mean, std)
        yield Case(f"{dtype}, mean {mean}, std {std}", dtype, 0, drawn, DRAWS)


def cases_of_layer_norm(shapes: Sequence[tuple[int, ...]]) -> Iterator[Case]:
    for (group, dtype), shape in itertools.product(LAYER_NORM.items(), shapes):
        name, drawn = f"{report.text(shape)}, {dtype}", partial(examples, shape)
        yield Case(name, group, 0, drawn, DRAWS, affine=True)


def constant(n: int, low: float, high: float, _: np.random.RandomState) -> NDArray:
    """Returns channels that are constant, at values from `low` to `high`."""
    famous = [value for value in (0.1, 3.3, 1000.1) if low < value < high]
    values = np.concatenate([famous, np.geomspace(low, high, 63)])
    return np.broadcast_to(values, (n, len(values)))


def normal(n: int, mean: ArrayLike, std: ArrayLike, random: np.random.RandomState) -> NDArray:
    """Draws n = 10^k values per channel, in about as many examples as positions."""
    k = len(str(n)) - 1
    mean, std = (np.reshape(value, (-1, 1)) for value in (mean, std))
    return mean + std * random.standard_normal((10 ** ((k + 1) // 2), CHANNELS, 10 ** (k // 2)))


def far(n: int, ratio: float, random: np.random.RandomState) -> NDArray:
    """Draws channels with means of both signs and standard deviations from 0.3 to 30."""
    std = 10 ** random.uniform(-0.5, 1.5, CHANNELS)
    return normal(n, ratio * std * np.where(np.arange(CHANNELS) % 2, -1, 1), std, random)


def outlier(n: int, place: int, random: np.random.RandomState) -> NDArray:
    """Draws a batch whose `place`-th example begins with 1e6 in every channel."""
    x = normal(n, 0, 1, random)
    x[place, :, 0] = 1e6
    return x


def examples(shape: tuple[int, ...], random: np.random.RandomState) -> NDArray:
    """Draws five examples of that shape, with one mean and one standard deviation."""
    mean, std = random.uniform(-30, 30), 10 ** random.uniform(-1, 1)
    return mean + std * random.standard_normal((5, *shape))


class Row(NamedTuple):
    """Holds a case's largest errors: infinite if the layer fails, NaN for a missing result."""

    group: str
    case: str
    at: float  # of the case
    layer: str
    errors: Errors


Rows = Sequence[Row]


def measure(settings: Settings) -> list[Row]:
    """Returns the largest errors of every layer in every case, over the case's batches."""
    of_batch_norm = settings.batch_norms, exact.batch_norm, None
    of_layer_norm = settings.layer_norms, exact.layer_norm, peers.LAYER_NORM
    shaped = cases_of_layer_norm(settings.shapes)
    every = [*cases(settings.n, settings.most), *shaped]
    rows = []
    with ThreadPoolExecutor(min(machine.cores(), 16)) as pool:  # most of the time is compiling
        for case in progress(every, "case"):
            of_layer = case.group in LAYER_NORM
            layers, solve, kind = of_layer_norm if of_layer else of_batch_norm
            layers = [
                name for name in layers if (name, case.group) != (peers.OURS_PALLAS, FLOAT64)
            ]
            solved = [(batch, solve(batch)) for batch in map(case.batch, range(case.draws))]
            rows += pool.map(partial(with_errors, case, solved, kind), layers)
    return rows


def with_errors(
    case: Case, solved: Sequence[tuple[Batch, Exact]], kind: str | None, layer: str
) -> Row:
    row = Row(case.group, case.name, case.at, layer, Errors(*[np.inf] * 5))
    try:
        found = [
            exact.errors(b, solution, peers.answer(kind, layer, b)) for b, solution in solved
        ]
        return row._replace(errors=Errors(*np.array(found).max(0).tolist()))
    except Exception as error:  # go on with the other layers
        said = f"{layer}, {case.name}: {type(error).__name__}: {error}"
        say(said.partition("\n")[0])
        return row


PAIR = (-1.83965693, -1.82964566)
MEANS = np.geomspace(0.01, 1e4, 61)  # of pairs with the same distance


class Pair(NamedTuple):
    """Holds a layer's output for a pair of values, and the gradient of the output's sum."""

    dtype: str
    layer: str
    mean: float  # of the pair
    y: float  # of the second value; the first value has the opposite sign
    error: float  # of y, the larger of two
    dx: float  # the larger of two; the exact one is 0


def pairs(layers: Sequence[str], dtype: str, x: Any) -> Iterator[Pair]:
    """Yields the layers' answers for pairs, [N, 2]."""
    x = np.asarray(x, dtype)
    batch = Batch(x, np.ones_like(x), None, None)
    y = exact.layer_norm(batch).answer.y
    for layer in layers:
        gave = peers.answer(peers.LAYER_NORM, layer, batch)
        error, dx = np.abs(gave.y - y).max(1), np.abs(gave.dx).max(1)
        columns = x.astype(float).mean(1), gave.y[:, 1], error, dx
        for numbers in zip(*columns, strict=True):
            yield Pair(dtype, layer, *numbers)


# float32 has a relative precision of 6e-8: the bounds allow a few roundings of numbers of order
# 1, whatever the mean and the number of values. float64 has 29 bits more.
Y, SCALE = 1e-6, {FLOAT64: 2.0**-29}
WIDE, EVERY = (*SINGLE, FLOAT32, FLOAT64), (*GROUPS, *LAYER_NORM)
HALF_CLAIM = "8. half precision: errors of y and dx as in 3 and 5, plus half an ulp"
CLAIMS = (
    ("1. a constant channel gives exactly its bias", "y", 0, [CONSTANT]),
    ("2. a constant channel has a variance of exactly 0", "variance", 0, [CONSTANT]),
    ("3. error of y <= 1e-6 max(1, abs(xhat))", "y", Y, WIDE[1:]),
    ("4. error of the variance <= 5e-7 (variance + eps)", "variance", 5e-7, GROUPS),
    ("5. error of dx <= 1e-6 max abs(dy) * weight / std", "dx", 1e-6, WIDE),
    ("6. error of dweight <= 1e-7 (sum abs(dy) + 4.3 abs(dweight))", "dweight", 1e-7, EVERY),
    ("7. error of dbias <= 2e-7 sum abs(dy)", "dbias", 2e-7, EVERY),
    (HALF_CLAIM, "y dx", Y, (*HALF, BFLOAT16)),
)


def within(rows: Rows, claim: str, of: str, bound: float, groups: Sequence[str]) -> Verdict:
    """Judges whether this package's errors in these groups are within the bound."""
    found = [
        (getattr(row.errors, quantity) / SCALE.get(row.group, 1), f"{row.case}; {row.layer}")
        for row, quantity in itertools.product(rows, of.split())
        if row.layer.startswith(OURS) and row.group in groups
    ]
    error, place = max(one for one in found if not np.isnan(one[0]))  # NaN: not measured
    return claim, f"{error:.1e} ({place})" if error else "0 in every case", error <= bound


def pair_is_right(found: Sequence[Pair]) -> Verdict:
    ours = [row for row in found if row.layer == OURS]
    error, dx = max(row.error for row in ours), max(row.dx for row in ours)
    claim = "9. layer norm of OneFlow's pair: y to 1e-6; the gradient of its sum is exactly 0"
    return claim, f"{error:.1e}; {dx:.1g}", bool(error <= Y and dx == 0)


def largest(rows: Rows, layer: str, group: str) -> str:
    """Returns a layer's largest error of y in a group, as text."""
    found = [row.errors.y for row in rows if (row.layer, row.group) == (layer, group)]
    worst = f"{np.max(found):.1e}"
    return {"0.0e+00": "0", "inf": "fails", "nan": "-"}.get(worst, worst)


STYLE: dict[str, dict[str, Any]] = {
    OURS: {"linewidth": 2.4, "marker": "o", "markersize": 4, "zorder": 4},
    EQUINOX: {"linewidth": 2.6, "alpha": 0.6},
    EQUINOX_EMA: {"linestyle": "-"},
    EQUINOX_BATCH: {"linestyle": "", "marker": "o", "markerfacecolor": "none", "markersize": 7},
    FLAX: {"linestyle": "--"},
    FLAX_TWO_PASS: {"linestyle": "-."},
    TORCH: {"linestyle": ":", "marker": "s", "markersize": 4},
}


def draw(rows: Rows, layers: Sequence[str]) -> Figure:
    """Draws the error of y of each batch norm: by mean, by count, and of constants."""
    figure = report.figure(11, 3.8)
    ratio, count, constants = figure.subplots(1, 3, width_ratios=(1, 1, 1.15))
    for axes, group, draw_group, label in (
        (ratio, RATIO, draw_sweep, "mean / standard deviation"),
        (count, COUNT, draw_sweep, "values a channel, at mean/std = 1e3"),
        (constants, CONSTANT, draw_constants, "largest |y| of a constant channel (exactly: 0)"),
    ):
        drawn = [row for row in rows if row.group == group and row.at]
        draw_group(axes, {name: [r for r in drawn if r.layer == name] for name in layers})
        axes.set_xlabel(label)
    report.legend_below(figure)
    return figure


def draw_sweep(axes: Axes, layers: dict[str, list[Row]]) -> None:
    """Draws the error of y by the place on an axis."""
    for layer, rows in layers.items():
        # 0 and infinity are drawn at the ends of the logarithmic axis, which has neither.
        values = np.clip([row.errors.y for row in rows], 1e-8, 1e8)
        look = {"label": layer, "color": peers.COLOURS[layer], **STYLE[layer]}
        axes.plot([row.at for row in rows], values, **look)
    axes.set(xscale="log", yscale="log", ylim=(5e-9, None), ylabel="error of y")
    axes.locator_params(axis="y", numticks=8)
    axes.minorticks_off()
    # The labels are outside of the lines, because eqx-norm should be between the lines.
    bounds = (Y, "the bound of eqx-norm, 1e-6", 2.2), (2.0**-24, "half an ulp of float32", 0.4)
    for level, label, away in bounds:
        axes.axhline(level, color=BLACK, linewidth=0.8, linestyle=(0, (6, 3)))
        axes.text(axes.get_xlim()[1], away * level, label, fontsize=7, ha="right", va="center")


def draw_constants(axes: Axes, layers: dict[str, list[Row]]) -> None:
    """Draws the output for a constant channel, which is exactly zero."""
    for layer, rows in layers.items():
        for row, marker in zip(rows, 2 * "o^s", strict=True):
            look: Any = {"markerfacecolor": "none", "color": peers.COLOURS[layer]}
            axes.plot(row.errors.y, layer, marker, label=f"_to {row.at:g}", **look)
    shown = axes.get_lines()[:3]
    names = [str(line.get_label())[1:] for line in shown]
    axes.legend(shown, names, title="constants", loc=(0.13, 0.25))
    axes.set_xscale("symlog", linthresh=1e-8)
    axes.set_xlim(left=-2e-9)
    axes.set_xticks([0, *(10.0**k for k in range(-7, 1))])
    axes.minorticks_off()
    axes.invert_yaxis()


ZERO = 1e-8  # 0 is drawn here, because a logarithmic axis has no 0


def draw_pairs(found: Sequence[Pair]) -> Figure:
    """Draws the errors for pairs by their distance from zero."""
    figure = report.figure(10, 4.2)
    distance = -float(np.mean(PAIR))
    titles = {
        "error": "Error of the output",
        "dx": "Input gradient of the sum of the output (0 is right)",
    }
    for axes, (quantity, title) in zip(figure.subplots(1, 2), titles.items(), strict=True):
        for layer in dict.fromkeys(row.layer for row in found):
            values = [getattr(row, quantity) for row in found if row.layer == layer]
            values = np.clip(np.nan_to_num(values, nan=np.inf), ZERO, 1e4)
            look = {"label": layer, "color": peers.COLOURS[layer], **STYLE[layer]}
            axes.plot(MEANS, values, **look | {"markersize": 3})
        axes.axvline(distance, color=BLACK, linewidth=0.8, linestyle=(0, (6, 3)))
        place = {"transform": axes.get_xaxis_transform(), "va": "top", "fontsize": 8}
        axes.text(1.1 * distance, 0.99, "the pair of the issue", **place)
        axes.set(xscale="log", yscale="log", xlabel="distance of the pair from zero")
        ticks = {ZERO: "0", **{10.0**k: f"$10^{{{k}}}$" for k in range(-7, 5, 2)}}
        axes.set_yticks([*ticks], [*ticks.values()])
        axes.minorticks_off()
        axes.set_title(title)
    report.legend_below(figure)
    figure.suptitle(
        "Layer norm in float32 of two values as close together as OneFlow's pair (0.01 apart)"
    )
    return figure


def main() -> int:
    experiment = Experiment("accuracy", __doc__, "fewer values, the layers in JAX")
    settings = QUICK if experiment.options.quick else Settings()
    on_cpu = jax.default_backend() == "cpu"
    if not on_cpu:
        settings = settings._replace(batch_norms=ON_GPU, layer_norms=ON_GPU, shapes=SERVED)
        experiment.name = f"accuracy_{machine.device_name()}"
    batch_norms, layer_norms = map(peers.present, settings[:2])
    settings = settings._replace(batch_norms=batch_norms, layer_norms=layer_norms)
    rows = measure(settings)
    header, lines = (*Row._fields[:-1], *Errors._fields), ((*r[:-1], *r.errors) for r in rows)
    experiment.save_csv(header, lines, digits=3)
    lines = ([g, *(largest(rows, layer, g) for layer in batch_norms)] for g in GROUPS)
    tables = [report.table(["largest error of y", *batch_norms], lines)]
    verdicts = [within(rows, *claim) for claim in CLAIMS]
    if on_cpu:
        dtypes = "float32", "float64"
        pair = [row for dtype in dtypes for row in pairs(layer_norms, dtype, [PAIR])]
        half = (PAIR[1] - PAIR[0]) / 2
        means = [*pairs(layer_norms, "float32", np.c_[MEANS - half, MEANS + half])]
        # y is a value, not an error, and gets the nine digits of a float32.
        experiment.save_csv(Pair._fields, [*pair, *means], part="pairs", digits=9)
        experiment.save_figure(draw(rows, batch_norms))
        experiment.save_figure(draw_pairs(means), "layer_norm")
        header = ("dtype", "layer", "output", "its error", "gradient of the sum")
        lines = [(*r[:2], f"{r.y:.7f}", f"{r.error:.1e}", f"{r.dx:.1e}") for r in pair]
        tables.append("Layer norm of OneFlow's pair:\n\n" + report.table(header, lines))
        verdicts.append(pair_is_right(pair))
    said = ", ".join(f"{layer} {largest(rows, layer, AFFINE)}" for layer in batch_norms)
    return experiment.publish(
        asked="How accurate is batch norm on hard inputs, and layer norm? "
        "[Caffe #3963](https://github.com/BVLC/caffe/issues/3963), "
        "[OneFlow #6149](https://github.com/Oneflow-Inc/oneflow/issues/6149)",
        answer=f"error of y at mean/std = 1e3: {said}",
        tables=tables,
        verdicts=verdicts,
        settings=settings._asdict(),
    )


if __name__ == "__main__":
    sys.exit(main())
