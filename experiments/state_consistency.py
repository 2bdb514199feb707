"""Shows which calls update the running statistics of batch normalisation, and how.

    python -m experiments.state_consistency          under a minute on 2 cores
    python -m experiments.state_consistency --quick  under 30 seconds; fails if a claim fails

In https://github.com/apache/mxnet/issues/21111 the answer depends on the device, on whether a
backward pass follows, and on the library that computes the layer; and one value per channel
gives NaN. The thread's script runs here: evaluate, call once in training mode, evaluate again;
then again with another batch. It runs forward only and with a backward pass, op by op, under
`jax.jit`, `jax.checkpoint` and `lax.scan`; with one value per channel (n = 1); and with a
number in the second batch that is NaN, infinite, or so large that its square is infinite.
(Equinox's mode="ema" evaluates with a variance of 0 before its first batch, so its evaluations
differ much.) tests/layers/test_memory.py has this package's rules in detail.
"""

import functools
import itertools
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from .common import peers, report

EPS = 1e-3  # as in the thread's script
# The share of the running average that an update keeps. It is near 0, so that the average is
# nearly the batch's, and a power of two, so that the old average can be subtracted exactly.
MOMENTUM = 1 / 16

OURS = (peers.OURS, peers.OURS_UNBIASED)
QUICK = (*OURS, peers.EQUINOX_EMA, peers.EQUINOX_BATCH)
WHOLE = (*QUICK, peers.FLAX, peers.TORCH)
SHAPE = (1, 2, 3)  # the thread's: batch, channels, space
ONE_VALUE = ((1, 6), (1, 6, 1))  # per channel
warnings.filterwarnings("ignore", "x of shape .* one value per channel")  # tested here
BAD = ("nan", "inf", "-inf", "3e38")

# Functions that train on a batch, and return output and gradients; that evaluate a batch; and
# that return the memory: means, variances, and then their weight or another statistic.
Calls = tuple[Callable[[Any], Any], Callable[[Any], NDArray], Callable[[], list[NDArray]]]


def scanned(apply: peers.Apply) -> peers.Apply:
    def scan(affine: Any, memory: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        def body(memory: Any, x: jax.Array) -> Any:
            return apply(affine, memory, x)[::-1]

        memory, y = jax.lax.scan(body, memory, x[None])
        return y[0], memory

    return jax.jit(scan)


# Ways to call a layer.
IN_JAX: dict[str, Callable[[peers.Apply], peers.Apply]] = {
    "jit": jax.jit,
    "op by op": lambda apply: apply,
    "checkpoint": lambda apply: jax.jit(jax.checkpoint(apply)),
    "scan": scanned,
}
IN_TORCH: dict[str, Callable[[Any], Any]] = {
    "op by op": lambda layer: layer,
    "checkpoint": lambda layer: functools.partial(
        peers.torch().utils.checkpoint.checkpoint, layer, use_reentrant=False
    ),
}


def in_jax(name: str, channels: int, way: str, backward: bool) -> Calls:
    layer = peers.batch_norm(name, channels, momentum=MOMENTUM, eps=EPS)
    forward, inference = map(IN_JAX[way], (layer.train, layer.evaluate))
    affine = jnp.ones(channels), jnp.zeros(channels)
    memory: Any = layer.memory

    def loss(affine: Any, x: jax.Array) -> Any:
        y, after = forward(affine, memory, x)
        return jnp.sum(jnp.sin(y)), (y, after)

    def train(x: Any) -> Any:
        nonlocal memory
        if not backward:
            y, memory = forward(affine, memory, x)
            return [y]
        gradients, (y, memory) = jax.grad(loss, (0, 1), has_aux=True)(affine, x)
        return jax.tree.leaves((y, gradients))

    def evaluate(x: Any) -> NDArray:
        nonlocal memory
        y, memory = inference(affine, memory, x)
        return np.asarray(y)

    return train, evaluate, lambda: [np.asarray(a) for a in layer.statistics(memory)[:3]]


def in_torch(name: str, channels: int, way: str, backward: bool) -> Calls:
    layer = peers.torch().nn.BatchNorm1d(channels, eps=EPS, momentum=1 - MOMENTUM)
    forward = IN_TORCH[way](layer)

    def train(x: Any) -> Any:
        layer.train()
        inputs = peers.tensor(x).requires_grad_()
        y = forward(inputs)
        if not backward:
            return [peers.array(y)]
        y.sin().sum().backward()
        return [*map(peers.array, (y, inputs.grad, layer.weight.grad, layer.bias.grad))]

    def evaluate(x: Any) -> NDArray:
        return peers.array(layer.eval()(peers.tensor(x)))

    return train, evaluate, lambda: [buffer.numpy().copy() for buffer in layer.buffers()]


class Played(NamedTuple):
    """Holds the results of a layer."""

    memories: list[list[NDArray]]  # at first, and after each training call
    evaluations: list[NDArray]  # of the first batch, at those times
    results: list[NDArray]  # outputs and gradients of the training calls
    raised: str  # what a training call raised, or empty
    evaluation_changed: bool  # whether an evaluation changed the memory


def play(name: str, batches: NDArray, way: str, backward: bool = True) -> Played:
    """Evaluates the first batch, before training and after training on each batch."""
    make = in_torch if name == peers.TORCH else in_jax
    train, evaluate, memory = make(name, batches.shape[2], way, backward)
    memories, evaluations, results = [memory()], [evaluate(batches[0])], []
    changed, raised = not same(memory(), memories[0]), ""
    try:
        for x in batches:
            results += train(x)
            memories.append(memory())
            evaluations.append(evaluate(batches[0]))
            changed |= not same(memory(), memories[-1])
    except ValueError:
        raised = "ValueError" + ("" if same(memory(), memories[-1]) else ", memory changed")
    return Played(memories, evaluations, results, raised, changed)


def drawn(shape: tuple[int, ...], number: str = "") -> NDArray:
    """Returns two batches; or twelve, the second of which has that number."""
    values = np.random.RandomState(0).standard_normal((12 if number else 2, *shape))
    batches = (2 + 1.5 * values).astype(np.float32)
    if number:
        batches[1].flat[-1] = float(number)
    return batches


def same(one: Sequence[NDArray], other: Sequence[NDArray]) -> bool:
    return all(a.tobytes() == b.tobytes() for a, b in zip(one, other, strict=True))


def update(name: str, memories: list[list[NDArray]], x: NDArray) -> tuple[str, NDArray]:
    """Returns the number of updates by `x` in the second training call, and, for one update,
    the errors of a biased and of an unbiased variance, relative to float64."""
    # This layer stores debiased averages: the average from 0, divided by its weight.
    weights = [memory[2] if name in OURS else 1 for memory in memories]
    before, after = (np.array(memories[i][:2], float) * weights[i] for i in (1, 2))
    values = np.moveaxis(x.astype(float), 1, 0).reshape(x.shape[1], -1)
    # An update keeps the share MOMENTUM of the running mean's distance from the batch's.
    left, was = (np.linalg.norm(average[0] - values.mean(1)) for average in (after, before))
    taken = (after[1] - MOMENTUM * before[1]) / (1 - MOMENTUM)
    errors = abs(taken / np.array([values.var(1), values.var(1, ddof=1)]) - 1).max(1)
    return f"{np.log(left / was) / np.log(MOMENTUM):.0f}", errors


def joined(said: Iterable[str]) -> str:
    return " or ".join(sorted(set(said))) or "-"


def finite(*arrays: NDArray) -> bool:
    return all(np.isfinite(array).all() for array in arrays)


def one_value(played: Played) -> str:
    all_finite = finite(*played.results, *played.evaluations, *played.memories[-1][:2])
    return played.raised or ("finite" if all_finite else "NaN")


def after_bad(played: Played) -> str:
    if not finite(played.evaluations[-1], *played.memories[-1][:2]):
        return "lost for ever"
    return "kept" if same(*played.memories[1:3]) else "changed"


UPDATES, EVALUATION, VARIANCE = "updates a call", "evaluation", "running variance"
ALONE, AFTER_BAD = "n = 1", "memory after NaN, inf"


def line_of(name: str) -> dict[str, str]:
    """Returns a layer's line of the table, by header."""
    ways = [*(IN_TORCH if name == peers.TORCH else IN_JAX)]
    batches, every = drawn(SHAPE), [*itertools.product(ways, (False, True))]
    usual = [play(name, batches, *way) for way in every]
    alone = [play(name, drawn(shape), ways[0]) for shape in ONE_VALUE]
    bad = [play(name, drawn(SHAPE, number), ways[0]) for number in BAD]

    updates = [update(name, played.memories, batches[1]) for played in usual]
    counts = [count for count, _ in updates]
    # The first way is forward only, without checkpoint.
    unusual = (way for way, count in zip(every, counts, strict=True) if count != counts[0])
    changed = any(played.evaluation_changed for played in (*usual, *alone, *bad))
    differences = (np.abs(p.evaluations[1] - p.evaluations[0]).max() for p in usual)
    # The statistics of one update are unknown if a call makes two.
    biased, unbiased = np.max([errors for count, errors in updates if count == "1"], axis=0)
    kind = "biased" if biased < unbiased else "unbiased"
    return {
        "layer": name,
        UPDATES: joined(counts),
        "changed by": joined(f"{way}{' and backward' * backward}" for way, backward in unusual),
        EVALUATION: f"memory {'changed' if changed else 'read'}, differs by "
        + joined(f"{difference:.2f}" for difference in differences),
        VARIANCE: f"{kind}, to {min(biased, unbiased):.0e}",
        ALONE: joined(map(one_value, alone)),
        AFTER_BAD: joined(map(after_bad, bad)),
    }


# Patterns for two cells: for this package's layer, and for the layer with unbiased=True.
CLAIMS = {
    "1. one training call is one update, however it is run": (UPDATES, "1", "1"),
    "2. evaluation reads the memory, and never changes it": (
        EVALUATION,
        *2 * [r"memory read, differs by (?!0\.00).*"],
    ),
    "3. an update uses the biased variance, the unbiased one if set so, to 1e-6": (
        VARIANCE,
        r"biased, to \de-0[7-9]",
        r"unbiased, to \de-0[7-9]",
    ),
    "4. n = 1: all is finite; unbiased: ValueError": (ALONE, "finite", "ValueError"),
    "5. a batch with NaN, inf leaves the memory unchanged": (AFTER_BAD, "kept", "kept"),
}


def judge(lines: Sequence[dict[str, str]]) -> Iterator[report.Verdict]:
    for claim, (header, *expected) in CLAIMS.items():
        cells = [line[header] for line in lines if line["layer"] in OURS]
        yield claim, "; ".join(cells), all(map(re.fullmatch, expected, cells))


def main() -> int:
    options = report.parser("state_consistency", __doc__, "the layers in JAX").parse_args()
    layers = peers.present(QUICK if options.quick else WHOLE)
    lines = [line_of(layer) for layer in tqdm(layers, unit="layer", disable=None)]
    unlike = [line["layer"] for line in lines if line[UPDATES] != "1"]
    return report.publish(
        options.out,
        "state_consistency",
        asked="Which calls update the running statistics, and how? "
        "[MXNet #21111](https://github.com/apache/mxnet/issues/21111)",
        answer=f"each training call, by one update (not {' and '.join(unlike) or 'none'})",
        tables=[report.table([*lines[0]], [[*line.values()] for line in lines])],
        verdicts=[*judge(lines)],
        settings={"layers": layers, "eps": EPS, "momentum": MOMENTUM},
    )


if __name__ == "__main__":
    sys.exit(main())
