"""Which normalisation trains with small batches? On MNIST, batches of 2 to 64 images.

    python -m experiments.small_batches              about 15 minutes on 2 cores
    python -m experiments.small_batches --quick      under 30 seconds; fails if a claim fails

Batch normalisation normalises a small batch by bad estimates, and inference by good ones. Batch
Renormalisation corrects the former towards the latter; group and layer normalisation do without
a batch. Ghost groups go the other way: a batch of 64 is cut into groups that are normalised
apart, and as noisily as small batches are. One network with four norm layers is trained with
each, at each size: on the same images in the same order, from the same parameters. Below the
accuracies is what three papers say of them, and whether it was seen here.

Ioffe, https://arxiv.org/abs/1702.03275; Wu and He, https://arxiv.org/abs/1803.08494;
Hoffer, Hubara and Soudry, https://arxiv.org/abs/1705.08741
"""

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Int
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from tqdm import tqdm

from eqx_norm import BatchNorm, GroupNorm, ghost_batches
from eqx_norm.strategies import Ramp, Renorm

from .common import mnist, report, training
from .common.report import UserError, Verdict

Setting = tuple[str, int]  # norm, and how many images are normalised together
Measured = dict[str, np.ndarray]  # by the names in MEASURED: [seeds]
Runs = dict[Setting, Measured]

BATCH, RENORM, GHOST, SMOOTH = "batch", "renorm", "ghost groups", "smooth_start"
GROUP, LAYER = "group norm", "layer norm"
LINES: dict[str, dict[str, str]] = {
    BATCH: {"color": report.BLUE, "linestyle": "-"},
    RENORM: {"color": report.VERMILION, "linestyle": "--"},
    GHOST: {"color": report.BLACK, "linestyle": ":"},
    SMOOTH: {"color": report.GREEN, "linestyle": "-."},
    GROUP: {"color": report.ORANGE, "linestyle": "-"},
    LAYER: {"color": report.PURPLE, "linestyle": "--"},
}
SIZES = (2, 4, 8, 16, 32, 64)
LARGEST = 64  # training.BATCH_SIZE, of which ghost groups are cut
GROUPS = "group"  # the name of the axis over which groups, or batches to test with, are mapped
MEASURED = ("accuracy_inference", "accuracy_training", "disagreement", "loss")
MOMENTUM = 0.9


@dataclasses.dataclass(frozen=True)
class Settings:
    trained: tuple[Setting, ...] = tuple((norm, size) for norm in LINES for size in SIZES)
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    images: int = 6400  # seen by every run: in 100 batches of 64, or in 3,200 of 2


QUICK = Settings(((BATCH, 64), (GHOST, 64), (GROUP, 4), (RENORM, 4), (BATCH, 4)), (0,), 3200)

# --------------------------------------------------------------------------------- training


def norm_of(setting: Setting, images: int) -> training.MakeNorm:
    """Returns what makes the setting's norm layers, for a run that sees so many images."""
    norm, size = setting
    batch = LARGEST if norm == GHOST else size
    momentum, steps = MOMENTUM ** (batch / LARGEST), images // batch
    # The paper's schedule, its 40,000 steps shortened to those of this run.
    r_max, d_max = Ramp(1, 3, steps // 8, steps), Ramp(0, 5, steps // 8, 5 * steps // 8)

    def make_norm(channels: int) -> eqx.Module:
        if norm in (GROUP, LAYER):
            return GroupNorm(8 if norm == GROUP else 1, channels)
        approach = Renorm(momentum, r_max, d_max) if norm == RENORM else norm
        how: Any = {"momentum": momentum, "approach": approach}
        if norm == GHOST:
            how |= {"approach": BATCH, "memory_axis_name": GROUPS}
        return BatchNorm(channels, training.AXIS, **how)

    return make_norm


def loss_of(model: Any, state: eqx.nn.State, images: Array, labels: Array, ghost: Any) -> Any:
    """Returns loss and state after a batch, or after one cut into groups of size `ghost`."""
    if not ghost:
        loss, (*_, state) = training.loss_of(model, state, images, labels)
        return loss, state
    axes: Any = {"in_axes": (None, None, 0, 0), "out_axes": (0, (0, 0, None))}
    of_groups = jax.vmap(training.loss_of, axis_name=GROUPS, **axes)
    groups = ghost_batches((images, labels), ghost)
    losses, (*_, state) = of_groups(model, state, *groups)
    return losses.mean(), state


def compare_modes(model: Any, state: eqx.nn.State, images: Array, labels: Array) -> Measured:
    """Returns the accuracy in both modes, and the share of images they give other digits.

    In training mode the images are normalised in the batches they come in, [n, size, ...];
    the state after is dropped. In inference mode they are one batch.
    """

    def digits(model: Any, images: Array) -> Int[Array, "n size"]:
        def of_batch(batch: Array) -> Array:
            return training.forward(model, state, batch)[0].argmax(axis=1)

        return jax.vmap(of_batch, axis_name=GROUPS)(images)

    inferred = digits(eqx.nn.inference_mode(model), images.reshape(1, -1, *images.shape[2:]))
    inferred, trained = inferred.reshape(labels.shape), digits(model, images)
    return {
        "accuracy_inference": (inferred == labels).mean(),
        "accuracy_training": (trained == labels).mean(),
        "disagreement": (inferred != trained).mean(),
    }


def train(setting: Setting, settings: Settings, data: mnist.Mnist, progress: tqdm) -> Measured:
    """Trains a network from each seed, and measures it; compiles once for all of them."""
    norm, size = setting
    batch = LARGEST if norm == GHOST else size
    # The rate of training.OPTIMISER, scaled as is usual for Adam: by the noise of a gradient.
    optimiser = optax.adam(3e-3 * (batch / LARGEST) ** 0.5)
    ghost = size if norm == GHOST else 0
    network = eqx.nn.make_with_state(training.Large)

    def start(seed: int) -> Any:
        model, state = network(norm_of(setting, settings.images), jax.random.key(seed))
        memory = optimiser.init(eqx.filter(model, eqx.is_inexact_array))
        return eqx.partition((model, state, memory), eqx.is_array)

    _, static = start(0)

    # jax.jit of arrays alone: eqx.filter_jit takes 4 ms a call to look through the states, and
    # a step of a small batch 2.
    @jax.jit
    def step(arrays: Any, images: Array, labels: Array) -> tuple[Any, Array]:
        model, state, memory = eqx.combine(arrays, static)
        loss_and_gradient = eqx.filter_value_and_grad(loss_of, has_aux=True)
        (loss, state), gradient = loss_and_gradient(model, state, images, labels, ghost)
        updates, memory = optimiser.update(gradient, memory)
        after = eqx.apply_updates(model, updates), state, memory
        return eqx.filter(after, eqx.is_array), loss

    @jax.jit
    def evaluate(arrays: Any, images: Array, labels: Array) -> Measured:
        model, state, _ = eqx.combine(arrays, static)
        return compare_modes(model, state, images, labels)

    images, labels = mnist.scaled(data.train.images), data.train.labels.astype(np.int32)
    # As many as batches of every size can be made of: 1,984 of 2,000.
    count = len(data.test.images) // LARGEST * LARGEST
    test = mnist.scaled(data.test.images)[:count], data.test.labels[:count].astype(np.int32)
    test = ghost_batches(test, size)
    found = []
    for seed in settings.seeds:
        arrays, _ = start(seed)
        losses = []
        order = training.batches(len(images), settings.images // LARGEST, seed)
        for chosen in np.concatenate([*order]).reshape(-1, batch):
            arrays, loss = step(arrays, images[chosen], labels[chosen])
            losses.append(loss)
        at_the_end = np.mean(jax.device_get(losses[-len(losses) // 10 :]))
        found.append({**jax.device_get(evaluate(arrays, *test)), "loss": at_the_end})
        progress.update()
    return {name: np.array([each[name] for each in found], np.float64) for name in MEASURED}
