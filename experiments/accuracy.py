"""Measures the errors of batch norm on hard inputs: this package, Equinox, Flax and PyTorch.

    python -m experiments.accuracy           about a minute on 2 cores
    python -m experiments.accuracy --quick   under 30 seconds; fails if a claim fails

Every implementation is accurate at mean 0 and standard deviation 1. The hard inputs of one
training step are constant channels (https://github.com/BVLC/caffe/issues/3963), means much
larger than the standard deviation, up to a million values per channel, an outlier, and half
precision. The exact answer is computed in extended precision. The claims name the units of the
errors; xhat is (x - mean) / std, and dy the gradient of y. Then every approach of this package
runs many steps, in training and inference mode.

On a GPU it compares this package's implementations, with the channels first and last. The
results are then named after the device, and the exit status is 1 if a claim fails.
"""

import dataclasses
import itertools
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm
from matplotlib.figure import Figure
from numpy.typing import ArrayLike, NDArray
from tqdm import tqdm

from eqx_norm import BatchNorm, strategies
from tests.exact import EPS, Answer, Batch, Errors, Exact, batch_norm, errors

from .common import peers, report
from .common.peers import EQUINOX_BATCH, EQUINOX_EMA, FLAX, FLAX_TWO_PASS, OURS, TORCH
from .common.report import BLACK, Verdict

LAYERS = OURS, EQUINOX_EMA, EQUINOX_BATCH, FLAX, FLAX_TWO_PASS, TORCH


@dataclasses.dataclass(frozen=True)
class Settings:
    layers: tuple[str, ...] = LAYERS
    n: int = 10_000  # values per channel, by default
    most: int = 1_000_000  # values per channel, at most
    steps: int = 300  # of the approaches: enough to see errors that accumulate
    ratios: tuple[float, ...] = (1.0, 1e3, 1e5, 1e7)
    momenta: tuple[float, ...] = (0.5, 0.99)


# Fewer values, and only layers of the packages that this one requires.
QUICK = Settings(LAYERS[:3], 1_000, 10_000, steps=30, ratios=(1.0, 1e7), momenta=(0.99,))

# -------------------------------------------------------------------------------- the batches

CHANNELS = 8
DRAWS = 8  # the worst counts, because some errors occur in one channel of a hundred
CONSTANTS = (1e-3, 1.0, 1e3, 65504.0)  # bounds of ranges, up to the largest float16
SINGLE = "constant", "mean/std to 1e7", "affine", "n to 1e6", "outlier 1e6", "OneFlow's pair"
CONSTANT, RATIO, AFFINE, COUNT, OUTLIER, ONEFLOW = SINGLE
HALF = "float16", "bfloat16"
GROUPS = (*SINGLE, *HALF)


@dataclasses.dataclass(frozen=True)
class Case:
    """Describes one kind of batch."""

    name: str
    group: str
    at: float  # its place on the axis of its group, or 0
    draw: Callable[[np.random.RandomState], NDArray]
    draws: int = 1
    affine: bool = False  # weight and bias at random, rather than 1 and 0

    def batch(self, number: int) -> Batch:
        """Returns a batch with float32 weight and bias. OneFlow's has a gradient of ones."""
        # Seeded by case, so that a new case does not change the batches of the others.
        random = np.random.RandomState([zlib.crc32(self.name.encode()), number])
        dtype = jnp.dtype(self.group if self.group in HALF else np.float32)
        x = self.draw(random).astype(dtype)
        dy = np.ones(x.shape) if self.group == ONEFLOW else random.standard_normal(x.shape)
        channels = x.shape[1]
        weight, bias = np.ones(channels), np.zeros(channels)
        if self.affine:
            weight, bias = random.uniform(0.5, 1.5, channels), random.uniform(-1, 1, channels)
        return Batch(x, dy.astype(dtype), weight.astype(np.float32), bias.astype(np.float32))


def cases(n: int, most: int) -> Iterator[Case]:
    """Yields all cases, with `n` values per channel by default and `most` at most."""
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


# ------------------------------------------------------------ one training step of each layer

FIRST, LAST = "channels first", "channels last"


class Row(NamedTuple):
    """Holds the largest errors over a case's batches: infinite if the layer fails, or NaN."""

    group: str
    case: str
    layer: str  # with its layout, on a GPU
    errors: Errors


Rows = Sequence[Row]
NOTHING = Errors(*[np.nan] * 5)


def answer(layer: str, layout: str, batch: Batch) -> Answer:
    """Returns a layer's answer to a batch, given as it is or as `[n, C]`, channels last."""
    if layout == FIRST:
        return peers.answer_of_batch_norm(layer, batch)
    n, channels, *space = batch.x.shape

    def back(values: NDArray) -> NDArray:
        return np.moveaxis(values.reshape(n, *space, channels), -1, 1)

    x, dy = (np.moveaxis(a, 1, -1).reshape(-1, channels) for a in (batch.x, batch.dy))
    repeated = np.arange(-(-channels // 128) * 128) % channels  # Mosaic's kernel needs 128
    given = Batch(*(a[..., repeated] for a in (x, dy, batch.weight, batch.bias)))
    gave = Answer(*(a[..., :channels] for a in peers.answer_of_batch_norm(layer, given)))
    return gave._replace(y=back(gave.y), dx=back(gave.dx))


def measure(settings: Settings) -> list[Row]:
    """Returns the largest errors of every layer in every case, over the case's batches."""
    rows = []
    with ThreadPoolExecutor(min(report.cores(), 16)) as pool:  # most of the time is compiling
        for case in tqdm([*cases(settings.n, settings.most)], unit="case", disable=None):
            given = [(b, batch_norm(b)) for b in map(case.batch, range(case.draws))]
            rows += pool.map(partial(measure_layer, case, given), settings.layers)
    return rows


def measure_layer(case: Case, given: Sequence[tuple[Batch, Exact]], name: str) -> Row:
    layer, _, layout = name.partition(" / ")
    row = Row(case.group, case.name, name, NOTHING)
    try:
        found = [errors(b, right, answer(layer, layout or FIRST, b)) for b, right in given]
        return row._replace(errors=Errors(*np.array(found).max(0).tolist()))
    except Exception as error:  # go on with the other layers
        tqdm.write(f"{name}, {case.name}: {type(error).__name__}: {error}".partition("\n")[0])
        # The kernel may refuse a batch.
        refused = layer == peers.OURS_PALLAS and "implementation=" in str(error)
        return row if refused else row._replace(errors=Errors(*[np.inf] * 5))


# ---------------------------------------------------------- every approach, over many steps

APPROACHES = ("ema", "batch", "adam", "smooth_start", "renorm", "variance_clip")
CLIP: dict[str, Any] = {"ratio": 4.0, "start": 5}  # early, so that most steps are clipped
OPEN = {"r_max": 3.0, "d_max": 5.0}  # from the first step on, so that every step is corrected


def reference(
    approach: str,
    batches: Iterable[Any],
    m: Any,
    ratio: float = np.inf,
    start: int = 0,
    r_max: float = 1.0,
    d_max: float = 0.0,
) -> Iterator[tuple[NDArray, NDArray]]:
    """Yields the statistics that normalise each batch in training, and inference after it.

    It is the recursion of each strategy in NumPy, in the precision of its inputs: pairs (mean,
    variance), and a momentum. Batches after the first `start` are clipped, if it is not 0;
    `r_max` and `d_max` belong to `renorm`.
    """
    h = w = r = remembered = np.zeros(())
    for k, b in enumerate(map(np.array, batches), start=1):
        if 0 < start < k:
            g = remembered[1]
            b[1] = np.clip(b[1], g / ratio, ratio * (g + g.mean()))
        h, w = m * h + (1 - m) * b, m * w + (1 - m)
        r = m * r + (1 - m) * b if k > 1 else b
        used, remembered = {
            "batch": (b, h / w),
            "ema": (r, r),
            "adam": (h / w, h / w),
            "smooth_start": (h + m**k * b, h / w),
            "renorm": (renormed(b, remembered if k > 1 else b, r_max, d_max), h / w),
        }[approach]
        yield used, remembered


def renormed(b: NDArray, running: NDArray, r_max: float, d_max: float) -> NDArray:
    """Returns the mean and variance that give ((x - mean_b) / sigma_b) r + d."""
    sigma_b, sigma = np.sqrt(b[1] + EPS), np.sqrt(running[1] + EPS)
    r = np.clip(sigma_b / sigma, 1 / r_max, r_max)
    d = np.clip((b[0] - running[0]) / sigma, -d_max, d_max)
    return np.array([b[0] - d * sigma_b / r, (sigma_b / r) ** 2 - EPS])


def drifting(ratio: float, steps: int) -> Iterator[NDArray[np.float32]]:
    """Yields x, [16, CHANNELS, 4], whose mean drifts, and jumps once."""
    random = np.random.RandomState(round(np.log10(ratio)))
    std = 10 ** random.uniform(-1, 1, (CHANNELS, 1))
    mean = ratio * std * np.where(np.arange(CHANNELS) % 2, -1, 1)[:, None]
    for step in range(steps):
        mean = mean + std * (random.standard_normal(std.shape) + 30 * (step == steps // 2))
        spread = std * 2 ** random.uniform(-1, 1, std.shape)
        yield (mean + spread * random.standard_normal((16, CHANNELS, 4))).astype(np.float32)


@eqx.filter_jit
def apply(layer: BatchNorm, x: NDArray, state: eqx.nn.State) -> tuple[jax.Array, eqx.nn.State]:
    return jax.vmap(layer, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)


def error_of(y: jax.Array, x: NDArray, statistics: NDArray) -> float:
    """Returns the largest error of y = xhat, in units of max(1, |xhat|)."""
    mean, variance = statistics[..., None]
    xhat = (x - mean) / np.sqrt(variance + np.longdouble(EPS))
    off = np.abs(np.asarray(y) - xhat) / np.maximum(1, np.abs(xhat))
    return float(np.nan_to_num(off, nan=np.inf).max())


def measure_steps(settings: Settings) -> Iterator[Row]:
    """Yields the largest error of y; inference sees the batch of the last training step."""
    kinds = [*itertools.product(APPROACHES, settings.momenta, settings.ratios)]
    for name, momentum, ratio in tqdm(kinds, unit="run", disable=None):
        how: Any = {"approach": name, "momentum": momentum}
        right = partial(reference, name)
        if name == "variance_clip":
            how = {"approach": strategies.VarianceClip(strategies.Batch(momentum), **CLIP)}
            right = partial(reference, "batch", **CLIP)
        if name == "renorm":
            how = {"approach": strategies.Renorm(momentum, **OPEN)}
            right = partial(reference, name, **OPEN)
        layer, state = eqx.nn.make_with_state(BatchNorm)(CHANNELS, "batch", eps=EPS, **how)
        inference = eqx.nn.inference_mode(layer)
        drawn = [*drifting(ratio, settings.steps)]
        moments = [(x.mean((0, 2)), x.var((0, 2))) for x in map(np.longdouble, drawn)]
        found = []
        for x, rights in zip(drawn, right(moments, np.longdouble(momentum)), strict=True):
            y, state = apply(layer, x, state)
            inferred, _ = apply(inference, x, state)
            found.append([error_of(y, x, rights[0]), error_of(inferred, x, rights[1])])
        for use, error in zip(("training", "inference"), np.max(found, axis=0), strict=True):
            case = f"{name}, momentum {momentum}, mean/std = {ratio:.0e}, {use}"
            yield Row(name, case, OURS, NOTHING._replace(y=float(error)))


# --------------------------------------------------------------------------------- verdicts

# float32 has a relative precision of 6e-8: the bounds allow a few roundings of numbers of order
# 1, whatever the mean and the number of values.
Y = 1e-6
CLAIMS = (
    ("1. a constant channel gives exactly its bias", "y", 0, [CONSTANT]),
    ("2. a constant channel has a variance of exactly 0", "variance", 0, [CONSTANT]),
    ("3. error of y <= 1e-6 max(1, abs(xhat))", "y", Y, SINGLE[1:]),
    ("4. error of the variance <= 5e-7 (variance + eps)", "variance", 5e-7, GROUPS),
    ("5. error of dx <= 1e-6 max abs(dy) * weight / std", "dx", 1e-6, SINGLE),
    ("6. error of dweight <= 1e-7 (sum abs(dy) + 4.3 abs(dweight))", "dweight", 1e-7, GROUPS),
    ("7. error of dbias <= 2e-7 sum abs(dy)", "dbias", 2e-7, GROUPS),
    ("8. half precision: errors of y and dx as in 3 and 5, plus half an ulp", "y dx", Y, HALF),
    ("9. error of y as in 3, every approach, training and inference", "y", Y, APPROACHES),
)


def within(rows: Rows, claim: str, of: str, bound: float, groups: Sequence[str]) -> Verdict:
    """Judges whether this package's errors in these groups are within the bound."""
    found = [
        (getattr(row.errors, quantity), f"{row.case}; {row.layer}")
        for row, quantity in itertools.product(rows, of.split())
        if peers.package(row.layer) == "eqx_norm" and row.group in groups
    ]
    error, place = max(one for one in found if not np.isnan(one[0]))  # NaN: not measured
    return claim, f"{error:.1e} ({place})" if error else "0 in every case", error <= bound


def largest(rows: Rows, layer: str, group: str) -> str:
    """Returns a layer's largest error of y in a group, as text."""
    found = [row.errors.y for row in rows if (row.layer, row.group) == (layer, group)]
    worst = f"{np.max(found):.1e}"
    return {"0.0e+00": "0", "inf": "fails", "nan": "-"}.get(worst, worst)


# ----------------------------------------------------------------------------------- figure

STYLE: dict[str, dict[str, Any]] = {
    OURS: {"linewidth": 2.4, "marker": "o", "markersize": 4, "zorder": 4},
    EQUINOX_EMA: {"linestyle": "-"},
    EQUINOX_BATCH: {"linestyle": "", "marker": "o", "markerfacecolor": "none", "markersize": 7},
    FLAX: {"linestyle": "--"},
    FLAX_TWO_PASS: {"linestyle": "-."},
    TORCH: {"linestyle": ":", "marker": "s", "markersize": 4},
}


def draw(settings: Settings, rows: Rows) -> Figure:
    """Draws the error of y of each layer: by mean and by count, of constants, by case."""
    of_cases, layers = [*cases(settings.n, settings.most)], settings.layers
    table = np.reshape([row.errors.y for row in rows], (len(of_cases), len(layers)))
    figure: Any = report.figure(11, 8.4)
    left, right = figure.subfigures(1, 2, width_ratios=(1, 1.15))
    ratio, count, constants = left.subplots(3, 1, height_ratios=(1.25, 1, 0.9))
    for axes, group, draw_group, label in (
        (ratio, RATIO, draw_sweep, "mean / standard deviation"),
        (count, COUNT, draw_sweep, "values a channel, at mean / standard deviation 1e3"),
        (constants, CONSTANT, draw_constants, "largest |y| of a constant channel (exactly: 0)"),
    ):
        drawn = [i for i, case in enumerate(of_cases) if case.group == group and case.at]
        draw_group(axes, layers, [of_cases[i].at for i in drawn], table[drawn])
        axes.set_xlabel(label)
    shown = ratio.get_lines()[: len(layers)]
    left.legend(handles=shown, loc="outside upper center", ncols=2, fontsize=8)
    draw_errors(right.subplots(), layers, of_cases, table)
    return figure


def draw_sweep(axes: Axes, layers: Sequence[str], at: list[float], table: NDArray) -> None:
    """Draws the error of y by the place on an axis."""
    for layer, values in zip(layers, table.T, strict=True):
        # A logarithmic axis has no 0 and no infinity: they are drawn at its ends.
        values = np.clip(values, 1e-8, 1e8)
        axes.plot(at, values, label=layer, color=peers.COLOURS[layer], **STYLE[layer])
    axes.set(xscale="log", yscale="log", ylim=(5e-9, None), ylabel="error of y")
    axes.locator_params(axis="y", numticks=8)
    axes.minorticks_off()
    # The labels are outside of the lines, because eqx-norm should be between them.
    bounds = (Y, "the bound of eqx-norm, 1e-6", 2.2), (2.0**-24, "half an ulp of float32", 0.4)
    for level, label, away in bounds:
        axes.axhline(level, color=BLACK, linewidth=0.8, linestyle=(0, (6, 3)))
        axes.text(at[-1], away * level, label, fontsize=7, ha="right", va="center")


def draw_constants(axes: Axes, layers: Sequence[str], at: list[float], table: NDArray) -> None:
    """Draws the output for a constant channel, which is exactly zero."""
    colors = [peers.COLOURS[layer] for layer in layers]
    for high, values, marker in zip(at, table, 2 * "o^s", strict=True):
        look: Any = {"marker": marker, "facecolors": "none", "edgecolors": colors}
        axes.scatter(values, layers, label=f"to {high:g}", **look)
    axes.legend(handles=axes.collections[:3], title="constants", loc=(0.13, 0.25))
    axes.set_xscale("symlog", linthresh=1e-8)
    axes.set_xlim(left=-2e-9)
    axes.set_xticks([0, *(10.0**k for k in range(-7, 1))])
    axes.minorticks_off()
    axes.invert_yaxis()


def draw_errors(axes: Axes, layers: Sequence[str], of: list[Case], table: NDArray) -> None:
    """Draws the error of y by case and layer: its exponent as text and colour."""
    table = np.where(np.isinf(table), np.nan, table)
    exponents = np.log10(np.where(table == 0, 1e-99, table))
    # White is the bound, blue is better, red is worse.
    ends = [report.BLUE, "#FFFFFF", report.VERMILION]
    scale = LinearSegmentedColormap.from_list("bound", ends).with_extremes(bad="#DDDDDD")
    norm = TwoSlopeNorm(-6, -8, 1)
    axes.imshow(np.clip(exponents, -8, 2), cmap=scale, norm=norm, aspect="auto")
    for (row, column), error in np.ndenumerate(table):
        text = "fails" if np.isnan(error) else f"{exponents[row, column]:z.1f}"
        text = text.replace("-", "\N{MINUS SIGN}") if error else "0"
        color = "white" if error > 1 or error < 3e-8 else BLACK
        axes.text(column, row, text, ha="center", va="center", fontsize=6.5, color=color)
    axes.set_xticks(range(len(layers)), layers, rotation=40, ha="left", rotation_mode="anchor")
    axes.set_yticks(range(len(of)), [case.name for case in of])
    for row, (case, below) in enumerate(itertools.pairwise(of)):
        if case.group != below.group:
            axes.axhline(row + 0.5, color="white", linewidth=3)
    axes.xaxis.tick_top()
    title = "log10 of the error of y: white is the bound, 1e-6; blue is better"
    axes.set_title(title, fontsize=8, y=-0.035)
    axes.tick_params(length=0, labelsize=7.5)
    axes.grid(False)
    axes.spines[:].set_visible(False)


# ------------------------------------------------------------------------------ the command


def main() -> int:
    options = report.parser("accuracy", __doc__, "fewer values, the layers in JAX").parse_args()
    settings, name = QUICK if options.quick else Settings(), "accuracy"
    on_gpu = jax.default_backend() != "cpu"
    if on_gpu:
        kinds = itertools.product((OURS, peers.OURS_PALLAS), (FIRST, LAST))
        settings = dataclasses.replace(settings, layers=tuple(map(" / ".join, kinds)))
        name = f"accuracy_{report.device_name()}"
    settings = dataclasses.replace(settings, layers=peers.present(settings.layers))
    layers = settings.layers
    with report.unfinished(options.out) as folder:
        rows, steps = measure(settings), list(measure_steps(settings))
        for file, found in ((name, rows), (f"{name}_approaches", steps)):
            header, lines = Row._fields[:3] + Errors._fields, ((*r[:3], *r[3]) for r in found)
            report.save_csv(folder / "results" / f"{file}.csv", header, lines, digits=3)
        if not on_gpu:
            report.save_figure(folder, name, draw(settings, rows))
        lines = ([g, *(largest(rows, layer, g) for layer in layers)] for g in GROUPS)
        table = report.table(["largest error of y", *layers], lines)
        said = ", ".join(f"{layer} {largest(rows, layer, AFFINE)}" for layer in layers)
        fail = report.publish(
            folder,
            name,
            asked="How accurate is batch norm on hard inputs? "
            "[Caffe #3963](https://github.com/BVLC/caffe/issues/3963)",
            answer=f"error of y at mean/std = 1e3: {said}",
            tables=[table],
            verdicts=[within([*rows, *steps], *claim) for claim in CLAIMS],
            settings=dataclasses.asdict(settings),
        )
    return int((options.quick or on_gpu) and fail > 0)


if __name__ == "__main__":
    with report.trouble("accuracy"):
        sys.exit(main())
