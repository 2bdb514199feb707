"""Trains networks on MNIST, and records every step."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float
from numpy.typing import NDArray
from tqdm import tqdm

from . import mnist
from .networks import NETWORKS, MakeNorm

AXIS = "batch"
BATCH_SIZE = 64
OPTIMISER = optax.adam(3e-3)

GradientNorms = dict[str, NDArray[np.float32]]  # by parameter: "linear1.weight"
Images = NDArray[np.float32]
Setting = TypeVar("Setting", bound=tuple[Any, ...])


class Record(NamedTuple):
    """Holds what was recorded; every array has one value a step."""

    # loss, largest_gradient_norm, output_mean and output_std of the (last) normalisation
    # layer, test_accuracy (NaN but after the evaluated steps), and whatever `probe` returned.
    curves: dict[str, NDArray[np.float32]]
    gradient_norms: GradientNorms


# Takes what a training step had: the model and the labels that went in, the log-probabilities
# and the state that came out. Returns scalars to record, by name.
Probe = Callable[[Any, eqx.nn.State, Array, Array], dict[str, Array]]


def no_probe(model: Any, state: eqx.nn.State, output: Array, labels: Array) -> dict[str, Array]:
    return {}


@dataclasses.dataclass(frozen=True)
class Job:
    """Says what is chosen in every experiment that trains."""

    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    network: str = "small"
    data: str = "subset"

    def noted(self) -> dict[str, Any]:
        """Returns what is noted beside the results: of the data, no path."""
        data = "subset" if self.data == "subset" else "folder"
        return {"seeds": self.seeds, "network": self.network, "data": data}


def runs(
    job: Job,
    settings: Collection[Setting],
    make_norm: Callable[[Setting], MakeNorm],
    steps: int,
    evaluated: Collection[int],
    change: Callable[[Setting, int, Images], Images] = lambda setting, i, images: images,
    probe: Probe = no_probe,
) -> Iterator[tuple[Setting, int, Record]]:
    """Yields every setting and seed with the record of its training; shows the progress."""
    data = mnist.load(job.data)
    pairs = list(itertools.product(settings, job.seeds))
    for setting, seed in (progress := tqdm(pairs, unit="run", disable=None)):
        progress.set_description(", ".join(map(str, setting)))
        record = train(
            NETWORKS[job.network],
            make_norm(setting),
            data,
            seed=seed,
            steps=steps,
            evaluated=evaluated,
            change=functools.partial(change, setting),
            probe=probe,
        )
        yield setting, seed, record


def train(
    network: Callable[..., Any],
    make_norm: MakeNorm,
    data: mnist.Mnist,
    *,
    seed: int,
    steps: int,
    evaluated: Collection[int] = (),
    change: Callable[[int, Images], Images] = lambda i, images: images,
    probe: Probe = no_probe,
) -> Record:
    """Trains `network` from `seed` for so many steps with Adam, and returns their record.

    The seed decides the initial parameters and the order of the images, so that runs of the
    same seed differ in their normalisation only. Test accuracy is measured after the steps in
    `evaluated`, and after the last. `change` gets each step, counted from 1, and its images,
    and returns the images to train on instead.
    """
    model, state = eqx.nn.make_with_state(network)(make_norm, jax.random.key(seed))
    parameters = eqx.filter(model, eqx.is_inexact_array)
    optimiser_state = OPTIMISER.init(parameters)
    images, labels = mnist.scaled(data.train.images), data.train.labels.astype(np.int32)
    test = jnp.asarray(mnist.scaled(data.test.images)), jnp.asarray(data.test.labels, jnp.int32)
    recorded: list[dict[str, Any]] = []
    for i, indices in enumerate(_batches(len(labels), steps, seed), start=1):
        batch = jnp.asarray(change(i, images[indices])), jnp.asarray(labels[indices])
        model, state, optimiser_state, values = step(
            model, state, optimiser_state, *batch, probe
        )
        measured = i in evaluated or i == steps
        accuracy = _accuracy(model, state, *test) if measured else np.nan
        recorded.append({**values, "test_accuracy": accuracy})
    curves = {name: np.array([at[name] for at in recorded]) for name in recorded[0]}
    norms = curves.pop("gradient_norms")
    curves["largest_gradient_norm"] = norms.max(axis=1)
    paths, _ = jax.tree_util.tree_flatten_with_path(parameters)
    names = [jax.tree_util.keystr(path).removeprefix(".") for path, _ in paths]
    return Record(curves, dict(zip(names, norms.T, strict=True)))


def _batches(images: int, steps: int, seed: int) -> Iterator[NDArray[np.int64]]:
    """Yields the indices of each batch: every epoch in a new order, whole batches only."""
    random = np.random.RandomState(seed)
    epochs = (random.permutation(images) for _ in range(steps))
    starts = range(0, images - BATCH_SIZE + 1, BATCH_SIZE)
    batches = (order[i : i + BATCH_SIZE] for order in epochs for i in starts)
    return itertools.islice(batches, steps)


def _forward(model: Any, state: eqx.nn.State, images: Float[Array, "n 1 28 28"]) -> Any:
    mapped = jax.vmap(model, axis_name=AXIS, in_axes=(0, None), out_axes=(0, 0, None))
    return mapped(images, state)


def _loss(model: Any, state: eqx.nn.State, images: Array, labels: Array) -> Any:
    log_probabilities, normed, state = _forward(model, state, images)
    picked = jnp.take_along_axis(log_probabilities, labels[:, None], axis=1)
    return -picked.mean(), (state, normed, log_probabilities)


# One compiled step, called from Python: inside a lax.scan XLA:CPU computes convolutions on one
# core, 12 times slower in the large network. Seeds run one after the other: as an ensemble
# under an outer vmap the same step takes 1.6 (small) and 4 (large) times as long per seed.
@eqx.filter_jit
def step(
    model: Any,
    state: eqx.nn.State,
    optimiser_state: Any,
    images: Array,
    labels: Array,
    probe: Probe,
) -> tuple[Any, eqx.nn.State, Any, dict[str, Array]]:
    """Returns model and states after one step, and what to record of it."""
    (loss, (state, normed, output)), gradients = eqx.filter_value_and_grad(_loss, has_aux=True)(
        model, state, images, labels
    )
    updates, optimiser_state = OPTIMISER.update(gradients, optimiser_state)
    norms = [jnp.linalg.norm(leaf.ravel()) for leaf in jax.tree.leaves(gradients)]
    values = {
        "loss": loss,
        "gradient_norms": jnp.stack(norms),
        "output_mean": normed.mean(),
        "output_std": normed.std(),
        **probe(model, state, output, labels),
    }
    return eqx.apply_updates(model, updates), state, optimiser_state, values


@eqx.filter_jit
def _accuracy(model: Any, state: eqx.nn.State, images: Array, labels: Array) -> Array:
    log_probabilities, _, _ = _forward(eqx.nn.inference_mode(model), state, images)
    return (log_probabilities.argmax(axis=1) == labels).mean()
