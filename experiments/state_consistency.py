"""Shows which calls update the running statistics of batch normalisation, and how.

    python -m experiments.state_consistency          under a minute on 2 cores
    python -m experiments.state_consistency --quick  under 30 seconds; fails if a claim fails

In https://github.com/apache/mxnet/issues/21111 the answer depends on the device, on whether a
backward pass follows, and on the library that computes the layer; and one value per channel
gives NaN. The thread's script runs here: evaluate, call once in training mode, evaluate again.
The training call is the forward pass alone, one with a backward pass, or one that the backward
pass computes again (a checkpoint). Then the script trains on one value per channel (n = 1), and
on a number that is NaN, infinite, or so large that its square is infinite.
tests/layers/test_memory.py tests this package's rules for every approach.
"""

import functools
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from .common import peers, report
from .common.experiment import Experiment, Verdict
from .common.progress import progress

EPS = 1e-3  # as in the thread's script
MOMENTUM = 1 / 16  # what an update keeps of the running average
MANY = 12  # updates after which MOMENTUM**MANY is less than a rounding error

OURS = (peers.OURS, peers.OURS_UNBIASED)
QUICK = (*OURS, peers.EQUINOX_EMA, peers.EQUINOX_BATCH)
FULL = (*QUICK, peers.FLAX, peers.TORCH)
SHAPE = (1, 2, 3)  # the thread's: batch, channels, space
ONE_VALUE = (1, 2, 1)
AFFINE = np.ones(SHAPE[1], np.float32), np.zeros(SHAPE[1], np.float32)  # weight and bias
BAD = ("nan", "inf", "-inf", "3e38")
FORWARD, BACKWARD, RECOMPUTED = CALLS = "forward", "backward", "recomputed"
warnings.filterwarnings("ignore", "x of shape .* one value per channel")  # tested here

# Functions that train on a batch, and return output and gradient; that evaluate a batch; and
# that return the running mean and variance.
Layer = tuple[Callable[..., list[Any]], Callable[[Any], NDArray], Callable[[], NDArray]]


@functools.cache
def compiled(name: str) -> tuple[peers.Layer, Callable[..., Any]]:
    layer = peers.batch_norm(name, SHAPE[1], momentum=MOMENTUM, eps=EPS)

    @functools.partial(jax.jit, static_argnums=2)
    def train(memory: Any, x: Any, how: str) -> Any:
        """Returns the output, and the gradient if there is one; and the new memory."""
        apply = jax.checkpoint(layer.train) if how == RECOMPUTED else layer.train
        if how == FORWARD:
            return apply(AFFINE, memory, x)
        y, pull_back, after = jax.vjp(lambda x: apply(AFFINE, memory, x), x, has_aux=True)
        return (y, *pull_back(jnp.cos(y))), after

    return layer, train


def in_jax(name: str) -> Layer:
    layer, step = compiled(name)
    memory = layer.memory

    def train(x: NDArray, how: str = BACKWARD) -> list[Any]:
        nonlocal memory
        outputs, memory = step(memory, x, how)
        return jax.tree.leaves(outputs)

    def evaluate(x: NDArray) -> NDArray:
        nonlocal memory
        y, memory = layer.evaluate(AFFINE, memory, x)
        return np.asarray(y)

    return train, evaluate, lambda: np.array(layer.statistics(memory))


def in_torch(_: str) -> Layer:
    layer = peers.torch().nn.BatchNorm1d(SHAPE[1], eps=EPS, momentum=1 - MOMENTUM)
    checkpoint = peers.torch().utils.checkpoint.checkpoint

    def train(x: NDArray, how: str = BACKWARD) -> list[Any]:
        layer.train()
        inputs = peers.tensor(x).requires_grad_()
        recomputed = functools.partial(checkpoint, layer, use_reentrant=False)
        y = (recomputed if how == RECOMPUTED else layer)(inputs)
        if how == FORWARD:
            return [peers.array(y)]
        y.backward(y.detach().cos())
        return [peers.array(y), peers.array(inputs.grad)]

    def evaluate(x: NDArray) -> NDArray:
        return peers.array(layer.eval()(peers.tensor(x)))

    def statistics() -> NDArray:
        return np.array([layer.running_mean.numpy(), layer.running_var.numpy()])

    return train, evaluate, statistics


equal = functools.partial(np.array_equal, equal_nan=True)


def drawn(shape: tuple[int, ...], seed: int = 0) -> NDArray:
    return np.random.RandomState(seed).normal(2, 1.5, shape).astype(np.float32)


def updates(layer: Layer, how: str) -> str:
    """Returns the number of updates by one call: each leaves the share MOMENTUM of the distance
    between the running mean and the batch's."""
    (train, _, statistics), x = layer, drawn(SHAPE, 1)
    for _ in range(MANY):
        train(drawn(SHAPE))
    before = statistics()
    train(x, how)
    left, was = (np.linalg.norm(mean - x.mean((0, 2))) for mean, _ in (statistics(), before))
    return str(round(np.log(left / was) / np.log(MOMENTUM)))


def evaluation(layer: Layer) -> str:
    (train, evaluate, statistics), x = layer, drawn(SHAPE)
    y = evaluate(x)
    train(x)
    before = statistics()
    differs, changed = not equal(y, evaluate(x)), not equal(before, statistics())
    return "changed" if changed else "read" if differs else "unused"


def variance(layer: Layer) -> str:
    (train, _, statistics), x = layer, drawn(SHAPE)
    for _ in range(MANY):
        train(x)
    return f"{np.mean(statistics()[1] / x.var((0, 2))):.4f}"


def one_value(layer: Layer) -> str:
    (train, evaluate, statistics), x = layer, drawn(ONE_VALUE)
    try:
        found = [*train(x), evaluate(x), statistics()]
    except ValueError:
        return "ValueError"
    return "finite" if all(np.isfinite(array).all() for array in found) else "NaN"


def after_bad(layer: Layer, number: str) -> str:
    (train, _, statistics), x = layer, drawn(SHAPE)
    train(x)
    before, bad = statistics(), x.copy()
    bad.flat[-1] = float(number)
    train(bad)
    if equal(before, statistics()):
        return "kept"
    for _ in range(MANY):
        train(x)
    return "changed" if np.isfinite(statistics()).all() else "lost for ever"


MAKES = "updates by forward, backward, recomputed"
COLUMNS = {
    MAKES: lambda make: ", ".join(updates(make(), how) for how in CALLS),
    "memory in evaluation": lambda make: evaluation(make()),
    "running / biased variance": lambda make: variance(make()),
    "n = 1": lambda make: one_value(make()),
    "memory after NaN, inf": lambda make: " or ".join({after_bad(make(), x) for x in BAD}),
}
# The cells of this package's layer, and of the layer with unbiased=True.
CLAIMS = {
    "1. one training call is one update, however it is run": ("1, 1, 1", "1, 1, 1"),
    "2. evaluation reads the memory, and never changes it": ("read", "read"),
    "3. an update uses the biased variance, the unbiased one if set so": ("1.0000", "1.5000"),
    "4. n = 1: all is finite; unbiased: ValueError": ("finite", "ValueError"),
    "5. a batch with NaN, inf leaves the memory unchanged": ("kept", "kept"),
}


def line_of(name: str) -> tuple[str, ...]:
    make = functools.partial(in_torch if name == peers.TORCH else in_jax, name)
    return name, *(measure(make) for measure in COLUMNS.values())


def judge(lines: Sequence[tuple[str, ...]]) -> Iterator[Verdict]:
    columns = zip(*(cells for name, *cells in lines if name in OURS), strict=True)
    for (claim, expected), cells in zip(CLAIMS.items(), columns, strict=True):
        yield claim, "; ".join(cells), cells == expected


def main() -> int:
    experiment = Experiment("state_consistency", __doc__, "the layers in JAX")
    layers = peers.present(QUICK if experiment.options.quick else FULL)
    lines = [line_of(layer) for layer in progress(layers, "layer")]
    unlike = [name for name, made, *_ in lines if set(made) != set("1, ")]
    return experiment.publish(
        asked="Which calls update the running statistics, and how? "
        "[MXNet #21111](https://github.com/apache/mxnet/issues/21111)",
        answer=f"each training call, by one update (not {' and '.join(unlike) or 'none'})",
        tables=[report.table(("layer", *COLUMNS), lines)],
        verdicts=[*judge(lines)],
        settings={"layers": layers, "eps": EPS, "momentum": MOMENTUM},
    )


if __name__ == "__main__":
    sys.exit(main())
