"""Tests which calls update the running statistics of batch normalisation, and how.

    python -m experiments.state_consistency          about a minute on 2 cores
    python -m experiments.state_consistency --quick  under 30 seconds; fails if a claim fails

In https://github.com/apache/mxnet/issues/21111 the answer depends on the device, on whether a
backward pass follows, and on the library that computes the layer; and one value per channel
gives NaN. This is the thread's script: evaluate, call once in training mode, evaluate again;
then again with another batch. It runs forward only and with a backward pass, op by op, under
`jax.jit`, `jax.checkpoint` and `lax.scan`; with one value per channel (n = 1); and with a
number in the second batch that is NaN, infinite, or so large that its square is infinite.
(Equinox's mode="ema" evaluates with a variance of 0 before its first batch, so its difference
is large.)
"""

import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from .common import peers, report
from .common.report import Verdict

EPS = 1e-3  # as in the thread's script
# The share of the running average that an update keeps. Near 0, so that the average is nearly
# the batch's; a power of two, so that the old average can be subtracted exactly.
MOMENTUM = 1 / 16

OURS = (peers.OURS, peers.OURS_UNBIASED)
QUICK = (*OURS, peers.EQUINOX_EMA, peers.EQUINOX_BATCH)
WHOLE = (*QUICK, peers.FLAX, peers.TORCH)
DTYPES = ("float32", "bfloat16")
SHAPES = ((1, 2, 3), (8, 3, 4))  # batch, channels, *spatial; the first is the thread's
ONE_VALUE = ((1, 6), (1, 6, 1))  # per channel
FINITE, BAD = "finite", ("nan", "inf", "-inf", "3e38")
OP_BY_OP, JIT, CHECKPOINT = "op by op", "jit", "checkpoint, op by op"


class Row(NamedTuple):
    # The run.
    layer: str
    dtype: str
    shape: tuple[int, ...]
    way: str
    backward: bool
    batch: str = FINITE  # or the number in the second batch that is not finite
    # The results. NaN: it cannot be measured, or has no meaning.
    raised: str = ""  # the type of the error that a training call raised
    evaluation_changed: bool = False  # whether an evaluation changed the memory
    difference: float = math.nan  # largest, of the evaluations before and after one update
    kept: bool = False  # whether the error, or the second batch, left the memory unchanged
    finite: bool = True  # whether all results are; for a bad batch, those of later batches
    updates: float = math.nan  # of the running average, by the second training call
    # Relative errors of that update's mean and variance, compared with float64.
    mean_error: float = math.nan
    biased_error: float = math.nan
    unbiased_error: float = math.nan

    @property
    def n(self) -> int:  # the number of values per channel
        return math.prod(self.shape) // self.shape[1]


def rows_of(layer: str, dtype: str, shapes: Sequence[tuple[int, ...]]) -> Iterator[Row]:
    """Yields the rows of a layer, without results."""
    torch = peers.package(layer) == "torch"
    ways, usual = ((OP_BY_OP, CHECKPOINT), OP_BY_OP) if torch else (WAYS, JIT)
    for shape, way, backward in itertools.product(shapes, ways, (False, True)):
        yield Row(layer, dtype, shape, way, backward)
    for shape in ONE_VALUE:
        yield Row(layer, dtype, shape, usual, True)
    for number in BAD:
        yield Row(layer, dtype, shapes[-1], usual, True, number)


# ---------------------------------------------------------------------------------- the layers


class InJax:
    """Holds a layer with its memory; `InTorch` has the same methods."""

    def __init__(self, row: Row):
        self._layer, self._train, self._evaluate = _steps(*row[:5])
        self._affine = jnp.ones(row.shape[1]), jnp.zeros(row.shape[1])
        self._memory: Any = self._layer.memory

    def evaluate(self, x: NDArray) -> NDArray:
        y, self._memory = self._evaluate(self._affine, self._memory, jnp.asarray(x))
        return np.asarray(y, np.float32)

    def train(self, x: NDArray) -> list[NDArray]:
        """Returns the output and, with a backward pass, the gradients."""
        (y, self._memory), gradients = self._train(self._affine, self._memory, jnp.asarray(x))
        return [np.asarray(leaf) for leaf in jax.tree.leaves((y, gradients))]

    def memory(self) -> list[NDArray]:
        """Returns means, variances, and then their weight or another statistic."""
        return [np.asarray(array) for array in self._layer.statistics(self._memory)[:3]]


def _scan(apply: peers.Apply) -> peers.Apply:
    def scanned(affine: Any, memory: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        body: Any = lambda memory, x: apply(affine, memory, x)[::-1]  # noqa: E731
        memory, y = jax.lax.scan(body, memory, x[None])
        return y[0], memory

    return scanned


WAYS: dict[str, Callable[[peers.Apply], peers.Apply]] = {
    OP_BY_OP: lambda apply: apply,
    JIT: lambda apply: apply,
    CHECKPOINT: jax.checkpoint,
    "checkpoint, jit": jax.checkpoint,
    "scan, jit": _scan,
}


@functools.cache  # compiled once for all batches
def _steps(name: str, dtype: str, shape: tuple[int, ...], way: str, backward: bool) -> Any:
    """Returns a layer, and its functions to train and evaluate in that way."""
    layer = peers.batch_norm(name, shape[1], momentum=MOMENTUM, eps=EPS)
    apply, evaluate = WAYS[way](layer.train), WAYS[way](layer.evaluate)

    def train(affine: Any, memory: Any, x: jax.Array) -> Any:
        def loss(affine: Any, x: jax.Array) -> Any:
            y, after = apply(affine, memory, x)
            return jnp.sum(jnp.sin(y)), (y, after)

        if not backward:
            return apply(affine, memory, x), ()
        return jax.grad(loss, (0, 1), has_aux=True)(affine, x)[::-1]

    compiled = jax.jit if way.endswith(JIT) else lambda function: function
    return layer, compiled(train), compiled(evaluate)


class InTorch:
    def __init__(self, row: Row):
        torch = peers.torch()
        self._layer = torch.nn.BatchNorm1d(row.shape[1], eps=EPS, momentum=1 - MOMENTUM)
        self._forward = self._layer
        if row.way == CHECKPOINT:
            checkpoint = torch.utils.checkpoint.checkpoint
            self._forward = functools.partial(checkpoint, self._forward, use_reentrant=False)
        self._backward = row.backward

    def evaluate(self, x: NDArray) -> NDArray:
        return peers.array(self._layer.eval()(peers.tensor(x)))

    def train(self, x: NDArray) -> list[NDArray]:
        layer = self._layer.train()
        inputs = peers.tensor(x).requires_grad_()
        y = self._forward(inputs)
        if not self._backward:
            return [peers.array(y)]
        y.sin().sum().backward()
        return [*map(peers.array, (y, inputs.grad, layer.weight.grad, layer.bias.grad))]

    def memory(self) -> list[NDArray]:
        return [buffer.numpy().copy() for buffer in self._layer.buffers()]


# ---------------------------------------------------------------------------------- the script


def play(row: Row, subject: Any) -> Row:
    """Returns the row with its results: evaluate, train on a batch, evaluate; and again."""
    count = 2 if row.batch == FINITE else 12  # ten good batches after a bad one
    values = 2 + 1.5 * np.random.RandomState(0).standard_normal((count, *row.shape))
    if row.batch != FINITE:
        values[1].flat[-1] = float(row.batch)
    first, second, *later = np.asarray(values, jnp.dtype(row.dtype))
    memories, evaluations, trained, changed = [subject.memory()], [], [], False
    try:
        for x in (None, first, second):
            if x is not None:
                trained += subject.train(x)
                memories.append(subject.memory())
            evaluations.append(subject.evaluate(first))
            changed |= not same(subject.memory(), memories[-1])
    except (TypeError, ValueError) as error:
        kept, raised = same(subject.memory(), memories[-1]), type(error).__name__
        return row._replace(raised=raised, evaluation_changed=changed, kept=kept)
    for x in later:
        subject.train(x)
    left = [subject.evaluate(first), *subject.memory()[:2]]
    left += [] if later else [*trained, *evaluations]
    row = row._replace(
        evaluation_changed=changed,
        difference=float(np.abs(evaluations[1] - evaluations[0]).max()),
        kept=same(memories[1], memories[2]),
        finite=all(np.isfinite(array).all() for array in left),
    )
    if later or row.n == 1:
        return row
    # This layer stores debiased averages: the average from 0, divided by its weight.
    weights = [memory[2] if row.layer in OURS else 1 for memory in memories]
    before, after = (np.array(memories[i][:2], float) * weights[i] for i in (1, 2))
    return Row(*row[:-4], *update(before, after, second))


def same(one: Sequence[NDArray], other: Sequence[NDArray]) -> bool:
    return all(a.tobytes() == b.tobytes() for a, b in zip(one, other, strict=True))


def update(before: NDArray, after: NDArray, x: NDArray) -> list[float]:
    """Returns the number of updates from `before` to `after`, and the errors of one."""
    values = np.moveaxis(x.astype(float), 1, 0).reshape(x.shape[1], -1)
    right = np.stack([values.mean(1), values.var(1), values.var(1, ddof=1)])
    # An update keeps the share MOMENTUM of the running mean's distance from the batch's.
    left, was = (np.linalg.norm(average[0] - right[0]) for average in (after, before))
    taken = (after - MOMENTUM * before) / (1 - MOMENTUM)
    errors = abs(taken[[0, 1, 1]] / right - 1).max(1)
    return [float(np.log(left / was) / np.log(MOMENTUM)), *map(float, errors)]


# --------------------------------------------------------------------------- table and verdicts


def usual(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row.batch == FINITE and row.n > 1]


def joined(said: Iterable[str]) -> str:
    return " or ".join(sorted(set(said))) or "-"


def counted(row: Row) -> str:
    return row.raised or f"{row.updates:.0f}"


def variance(rows: list[Row]) -> str:
    # The statistics of one update are unknown if a call makes two.
    errors = [row[-2:] for row in rows if counted(row) == "1"]
    if not errors:
        return joined(map(counted, rows))
    biased, unbiased = np.max(errors, axis=0)
    return f"biased, to {biased:.0e}" if biased < unbiased else f"unbiased, to {unbiased:.0e}"


def one_value(row: Row) -> str:
    if row.raised:
        return row.raised + ("" if row.kept else ", memory changed")
    return "finite" if row.finite else "NaN"


def after_bad(row: Row) -> str:
    return "lost for ever" if not row.finite else "kept" if row.kept else "changed"


def columns(found: list[Row]) -> dict[str, str]:
    """Returns a layer's line of the table, by header."""
    single, half = ([r for r in usual(found) if r.dtype == dtype] for dtype in DTYPES)
    # The first is forward only, op by op.
    unusual = (row for row in single if counted(row) != counted(single[0]))
    ways = (f"{row.way.partition(',')[0]}{' and backward' * row.backward}" for row in unusual)
    evaluated = "memory changed" if any(r.evaluation_changed for r in found) else "memory read"
    differences = joined(f"{row.difference:.2f}" for row in single if row.shape == SHAPES[0])
    ones = (row for row in found if row.n == 1 and row.dtype == "float32")
    bad = (row for row in found if row.batch != FINITE and not row.raised)
    return {
        "layer": found[0].layer,
        "updates a call": joined(map(counted, single)),
        "changed by": joined(ways),
        "evaluation": f"{evaluated}, differs by {differences}",
        "running variance, float32": variance(single),
        "bfloat16": variance(half),
        "n = 1": joined(map(one_value, ones)),
        "memory after NaN, inf": joined(map(after_bad, bad)),
    }


def in_all(claim: str, holds: Sequence[bool]) -> Verdict:
    return claim, f"in {sum(holds)} of {len(holds)} rows", all(holds)


def one_update(ours: list[Row]) -> Verdict:
    claim = "1. one training call is one update, however it is run"
    return in_all(claim, [counted(row) == "1" for row in usual(ours)])


def evaluation_reads(ours: list[Row]) -> Verdict:
    claim = "2. evaluation never changes the memory, and reads it from the first update on"
    return in_all(claim, [not r.evaluation_changed and r.difference > 0 for r in usual(ours)])


def right_statistics(ours: list[Row]) -> Verdict:
    claim = "3. an update uses the batch's mean and variance, unbiased if set so, to 1e-6"
    said = {peers.OURS: "biased_error", peers.OURS_UNBIASED: "unbiased_error"}
    errors = [(row.mean_error, getattr(row, said[row.layer])) for row in usual(ours)]
    most = float(np.max(errors))  # NaN, if there is one
    return claim, f"at most {most:.1e} in {len(errors)} rows", most <= 1e-6  # a few roundings


def one_value_works(ours: list[Row]) -> Verdict:
    claim = "4. n = 1: all is finite; unbiased: ValueError, memory unchanged"
    right = {peers.OURS: "finite", peers.OURS_UNBIASED: "ValueError"}
    return in_all(claim, [one_value(row) == right[row.layer] for row in ours if row.n == 1])


def bad_kept_out(ours: list[Row]) -> Verdict:
    claim = "5. a batch with NaN, inf: memory unchanged, and all finite ten batches later"
    return in_all(claim, [after_bad(row) == "kept" for row in ours if row.batch != FINITE])


def main() -> int:
    options = report.parser("state_consistency", __doc__, "4 layers in float32").parse_args()
    found = []
    layers = peers.present(QUICK if options.quick else WHOLE)
    dtypes, shapes = DTYPES[: 1 if options.quick else 2], SHAPES[: 1 if options.quick else 2]
    every = [row for how in itertools.product(layers, dtypes) for row in rows_of(*how, shapes)]
    with report.unfinished(options.out) as folder:
        for row in tqdm(every, unit="row", disable=None):
            made = InTorch if peers.package(row.layer) == "torch" else InJax
            found.append(play(row, made(row)))
        report.save_csv(folder / "results" / "state_consistency.csv", Row._fields, found)
        lines = [columns([row for row in found if row.layer == layer]) for layer in layers]
        unlike = [line["layer"] for line in lines if line["updates a call"] != "1"]
        ours = [row for row in found if row.layer in OURS]
        claims = (one_update, evaluation_reads, right_statistics, one_value_works, bad_kept_out)
        fail = report.publish(
            folder,
            "state_consistency",
            asked="Which calls update the running statistics, and how? "
            "[MXNet #21111](https://github.com/apache/mxnet/issues/21111)",
            answer=f"each training call, by one update (not {' and '.join(unlike) or 'none'})",
            tables=[report.table([*lines[0]], [[*line.values()] for line in lines])],
            verdicts=[claim(ours) for claim in claims],
            settings={"layers": layers, "eps": EPS, "momentum": MOMENTUM},
        )
    return int(options.quick and fail > 0)


if __name__ == "__main__":
    with report.trouble("state_consistency"):
        sys.exit(main())
