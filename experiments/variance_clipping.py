"""Tests on MNIST which failures variance clipping prevents, Ginsburg's proposal in Caffe #3963.

    python -m experiments.variance_clipping          about a minute on 2 cores
    python -m experiments.variance_clipping --quick  under 30 seconds; fails if a claim fails

One corrupted batch can ruin the running statistics of batch normalisation. The thread proposes
to clip the variance of each batch to near the running variance, and names two failures that
clipping prevents: (A) gradients explode and training accuracy collapses; (B) training looks
fine, but corrupted running statistics ruin test accuracy. Here a small network is trained with
`batch`, `ema` and `smooth_start`, with and without clipping, and three batches are corrupted in
one of several ways. The results show the failures, and the cost of clipping: a batch of huge
variance is normalised by a small variance. https://github.com/BVLC/caffe/issues/3963
"""

import itertools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from numpy.typing import NDArray

from eqx_norm import BatchNorm
from eqx_norm.strategies import VarianceClip, named

from .common import report, training
from .common.experiment import Experiment, Verdict
from .common.training import Curves

Setting = tuple[str, bool, str]  # approach, whether to clip, corruption

MOMENTUM = 0.99
# Ginsburg's factor. He starts after 200 batches; here training has settled after 100. (All
# steps shifted by 100 give the same verdicts.)
RATIO, START = 4.0, 100
# These steps come soon after the start of clipping. At the end, 100 steps after the last one, a
# third of a corrupted batch is left in the running average of momentum 0.99.
CORRUPTED = (110, 120, 130)
STEPS = 230
WINDOW = 20  # steps: "soon after" and "at the end" are means over these
DRAWN_FROM = 90  # earlier steps are equal in all runs of an approach and seed
# Steps right before and after the corrupted batches, and every tenth step.
EVALUATED = {*range(DRAWN_FROM, STEPS, 10), *(step - 1 for step in CORRUPTED), STEPS}

CLEAN = "none"
SCALED, CONTRAST, ONE_IMAGE = "scaled by 1e3", "contrast by 1e3", "one image by 1e3"
CONSTANT, LOUD, FAINT = "constant", "constant 1e3", "scaled by 1e-3"

# Functions of a batch in which 0 is black and 1 is white; add a corruption here.
CORRUPTIONS: dict[str, Callable[[NDArray], NDArray]] = {
    SCALED: lambda ink: 1e3 * ink,  # a variance 1e6 times as large, a mean 1e3 times
    # An equally large variance, but an unchanged mean of every pixel over the batch.
    CONTRAST: lambda ink: ink.mean(axis=0) + 1e3 * (ink - ink.mean(axis=0)),
    # The first of 64: a variance 2e4 times as large, a mean 20 times.
    ONE_IMAGE: lambda ink: np.concatenate([1e3 * ink[:1], ink[1:]]),
    CONSTANT: np.ones_like,  # white, and a variance of 0
    LOUD: lambda ink: np.full_like(ink, 1e3),  # 1e3 times as bright as white
    FAINT: lambda ink: 1e-3 * ink,  # a variance 1e-6 times as large
}

# Approaches, corruptions and seeds. A failure counts if most seeds have it.
FULL = (("batch", "ema", "smooth_start"), (CLEAN, *CORRUPTIONS), (0, 1, 2, 3, 4))
QUICK = (("batch", "ema"), (CLEAN, SCALED, CONTRAST, ONE_IMAGE, LOUD), (0,))


class Perceptron(eqx.Module):
    """Applies linear, norm, ReLU, linear: the norm's input is a linear function of the image.

    So a batch scaled by 1e3 has 1e6 times the variance in every channel. A training step takes
    a millisecond.
    """

    linear1: eqx.nn.Linear
    norm: BatchNorm
    linear2: eqx.nn.Linear

    def __init__(self, strategy: Any, key: PRNGKeyArray):
        keys = jax.random.split(key)
        self.linear1 = eqx.nn.Linear(28 * 28, 64, use_bias=False, key=keys[0])
        self.norm = BatchNorm(64, training.AXIS, approach=strategy)
        self.linear2 = eqx.nn.Linear(64, 10, key=keys[1])

    def __call__(self, x: Float[Array, "1 28 28"], state: eqx.nn.State) -> training.Output:
        # Black is 0 here: with -1, weights of pixels that are black in every image would have
        # gradients of rounding errors alone, which Adam scales up to whole steps.
        ink = (jnp.ravel(x) + 1) / 2
        normed, state = self.norm(self.linear1(ink), state)
        return jax.nn.log_softmax(self.linear2(jax.nn.relu(normed))), normed, state


def train(setting: Setting, seed: int) -> Curves:
    """Trains one network; its initial parameters and batches depend only on the seed.

    The curves include "running_variance", the mean over channels.
    """
    approach, clipped, corruption = setting
    strategy: Any = named(approach, MOMENTUM)
    if clipped:
        strategy = VarianceClip(strategy, ratio=RATIO, start=START)

    def corrupt(step: int, images: NDArray) -> NDArray:
        if step not in CORRUPTED or corruption == CLEAN:
            return images
        ink = CORRUPTIONS[corruption]((images + np.float32(1)) / np.float32(2))
        return (2 * ink - 1).astype(np.float32)

    def observe(_: int, model: Perceptron, state: eqx.nn.State) -> dict[str, Array]:
        running = state.get(model.norm.memory_index).statistics
        return {"running_variance": running.variance.mean()}

    made = eqx.nn.make_with_state(Perceptron)(strategy, jax.random.key(seed))
    return training.run(made, seed, STEPS, EVALUATED, change=corrupt, observe=observe)


PANELS = {
    "loss": "training loss",
    "training_accuracy": "training accuracy",
    "running_variance": "running variance,\nmean over channels",
    "test_accuracy": "test accuracy,\ninference mode",
}


def draw(runs: dict[Setting, Curves]) -> Figure:
    """Draws loss, training accuracy, running variance and test accuracy, by approach."""
    lines = {
        "no corrupted batch": ((False, CLEAN), {"color": report.BLACK, "linestyle": ":"}),
        "without clipping": ((False, ONE_IMAGE), {"color": report.VERMILION}),
        "with clipping": ((True, ONE_IMAGE), {"color": report.BLUE, "linestyle": "--"}),
    }
    approaches = list(dict.fromkeys(approach for approach, _, _ in runs))
    figure = report.figure(3.2 * len(approaches) + 0.6, 8.8)
    axes = figure.subplots(4, len(approaches), sharex=True, sharey="row", squeeze=False)
    for row, (name, text) in zip(axes, PANELS.items(), strict=True):
        for panel, approach in zip(row, approaches, strict=True):
            for label, (how, line) in lines.items():
                report.plot_seeds(panel, runs[approach, *how][name], label=label, **line)
            for step in CORRUPTED:
                panel.axvline(step, color=report.BLACK, linewidth=0.6, alpha=0.6, zorder=0)
        row[0].set_ylabel(text)
        if name.endswith("accuracy"):
            row[0].set_ylim(0, 1)
            row[0].yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
        else:
            row[0].set_yscale("log")
    for top, bottom, approach in zip(axes[0], axes[-1], approaches, strict=True):
        top.set_title(approach)
        bottom.set(xlabel="training step", xlim=(DRAWN_FROM, STEPS + 1))
    title = f"vertical lines: the corrupted batches, {ONE_IMAGE}; shaded: the range over seeds"
    report.legend_below(figure, title=title)
    return figure


LEGEND = f"""\
A1: the largest gradient is more than 10 times the clean run's.
A2: training accuracy is below 50% in the {WINDOW} steps after the last corrupted batch.
ruined: at the end, test accuracy is 10 points or more below the clean run's.
B: ruined, and training accuracy is within 2 points of the clean run's.
All are medians over the seeds; a failure counts if most seeds have it. A case is a row: one
corruption with one approach."""


class Cell(NamedTuple):
    """Compares a setting with its approach on clean batches: medians over seeds."""

    failures: str  # as named in LEGEND
    lost_at_once: float  # points of test accuracy, right after the last corrupted batch
    lost: float  # points of test accuracy, at the end
    gradient: float  # the largest norm since the first corrupted batch / the clean run's
    accuracy_after: float  # in training, soon after the last corrupted batch
    growth: float  # of the running variance: the largest factor in one step, over seeds


Pairs = dict[tuple[str, str], tuple[Cell, Cell]]  # by approach, corruption: un-, clipped
COLUMNS = {
    "failures": "{0.failures}",
    "test points lost, at once / 100 steps later": "{0.lost_at_once:z.1f} / {0.lost:z.1f}",
    "gradient, times the clean run's": "{0.gradient:,.1f}",
    f"training accuracy, {WINDOW} steps after": "{0.accuracy_after:.1%}",
}


def compare(found: Curves, clean: Curves) -> Cell:
    first, last = CORRUPTED[0] - 1, CORRUPTED[-1]
    gradient, of_clean = (c["largest_gradient_norm"][:, first:].max(1) for c in (found, clean))
    end, clean_end = (c["training_accuracy"][:, -WINDOW:].mean(1) for c in (found, clean))
    after = found["training_accuracy"][:, last : last + WINDOW].mean(1)
    lost = 100 * (clean["test_accuracy"] - found["test_accuracy"])
    variance = found["running_variance"]
    ruined = ~(lost[:, -1] < 10)  # written so that a NaN is a failure
    seen = {"A1": ~(gradient <= 10 * of_clean), "A2": ~(after >= 0.5)}
    seen |= {"B": ruined & (end >= clean_end - 0.02), "ruined": ruined}
    return Cell(
        " ".join(name for name, by_seed in seen.items() if by_seed.mean() > 0.5) or "-",
        lost_at_once=float(np.median(lost[:, last - 1])),
        lost=float(np.median(lost[:, -1])),
        gradient=float(np.median(gradient / of_clean)),
        accuracy_after=float(np.median(after)),
        growth=float((variance[:, first:] / variance[:, first - 1 : -1]).max()),
    )


def prevented(pairs: Pairs, failure: str, still: str) -> str:
    """Returns in how many of the cases with `failure` clipping prevents `still`."""
    failing = [clipped for plain, clipped in pairs.values() if failure in plain.failures]
    gone = sum(still not in clipped.failures for clipped in failing)
    return f"in {gone} of the {len(failing)} cases that have it"


def judge(pairs: Pairs) -> list[Verdict]:
    corrupted = [cell for (_, corruption), (cell, _) in pairs.items() if corruption != CLEAN]
    a, b = (sum(name in cell.failures for cell in corrupted) for name in ("A", "B"))
    # A clipped variance is at most c (g + mean g), whose mean over channels is 2 c mean g, and
    # has this share of the running average. The last term of `bound` is for rounding.
    share = (1 - MOMENTUM) / (1 - MOMENTUM**START)
    bound = 1 + (2 * RATIO - 1) * share + 1e-5
    growth, clipped_growth = (max(pair[i].growth for pair in pairs.values()) for i in (0, 1))
    image, scaled, loud = (pairs["batch", bad] for bad in (ONE_IMAGE, SCALED, LOUD))
    change = max(abs(clipped.lost) for (_, bad), (_, clipped) in pairs.items() if bad == CLEAN)
    lost = "points lost: without {.lost:.1f}, with {.lost:.1f}"
    return [
        (
            "1. without clipping, both A and B happen",
            f"A in {a} and B in {b} of {len(corrupted)} cases",
            a > 0 and b > 0,
        ),
        (
            "2. clipping keeps the running variance from jumping",
            f"at most {clipped_growth:.3f} times in one step, without clipping {growth:.3g}",
            clipped_growth <= bound < growth,
        ),
        # Claim 3 is for this network. The stability experiment's networks lose 20 and 35 points
        # with clipping, because changes of the weights by the image's gradients last longer.
        (
            "3. clipping prevents B in batch after one corrupted image a batch",
            lost.format(*image),
            "B" in image[0].failures and "ruined" not in image[1].failures,
        ),
        (
            "4. the cost: batch, scaled by 1e3, has A1 only with clipping",
            "gradient: without {.gradient:.1f}, with {.gradient:.1f}".format(*scaled),
            "A1" in scaled[1].failures and "A1" not in scaled[0].failures,
        ),
        (
            "5. the mean is not clipped: batch, constant 1e3, has B either way",
            lost.format(*loud),
            all("B" in cell.failures for cell in loud),
        ),
        (
            "6. clipping changes the accuracy of clean training by a point at most",
            f"test accuracy changes by {change:.1f} points at most",
            change <= 1,
        ),
    ]


def main() -> int:
    experiment = Experiment("variance_clipping", __doc__, "2 approaches, 4 corruptions, 1 seed")
    approaches, corruptions, seeds = QUICK if experiment.options.quick else FULL
    settings = [*itertools.product(approaches, (False, True), corruptions)]
    runs = training.run_all(settings, seeds, train)
    cells = {key: compare(runs[key], runs[key[0], False, CLEAN]) for key in runs}
    pairs = {(a, bad): (cells[a, False, bad], cells[a, True, bad]) for a, _, bad in cells}

    lines = ((*setting, *cell) for setting, cell in cells.items())
    header = ("approach", "clipped", "corruption", *Cell._fields)
    experiment.save_csv(header, lines)
    experiment.save_figure(draw(runs), "one_image")

    lines = [
        (bad, approach, *(" → ".join(map(form.format, pair)) for form in COLUMNS.values()))
        for (approach, bad), pair in pairs.items()
        if bad != CLEAN
    ]
    shown = report.table(("without → with clipping", "approach", *COLUMNS), lines)
    hopes = [
        ("clipping prevents A1, that gradients explode", prevented(pairs, "A1", "A1")),
        ("clipping prevents A2, that training collapses", prevented(pairs, "A2", "A2")),
        ("clipping prevents B, that inference is ruined", prevented(pairs, "B", "ruined")),
    ]
    plain, clipped = pairs["batch", ONE_IMAGE]
    return experiment.publish(
        asked="Does clipping a batch's variance protect training and inference? "
        "[Caffe #3963](https://github.com/BVLC/caffe/issues/3963)",
        answer=f"with one corrupted image a batch it loses {clipped.lost:.1f} points, not "
        f"{plain.lost:.1f}; it prevents exploding gradients {hopes[0][1]}",
        tables=[shown, LEGEND, report.table(("the thread expects", "observed"), hopes)],
        verdicts=judge(pairs),
        settings={"approaches": approaches, "corruptions": corruptions, "seeds": seeds},
    )


if __name__ == "__main__":
    sys.exit(main())
