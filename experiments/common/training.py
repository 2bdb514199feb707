"""Defines two networks for MNIST, and a training step that returns a record."""

import itertools
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray
from numpy.typing import NDArray

from . import mnist
from .progress import progress

AXIS = "batch"  # over which the images of a batch are mapped
BATCH_SIZE = 64  # the issue's
OPTIMISER = optax.adam(3e-3)  # the small network reaches 92% in 100 steps

# Makes a normalisation layer for a number of channels.
MakeNorm = Callable[[int], Any]
Curves = dict[str, np.ndarray]  # recorded values, by name: [steps], or [seeds, steps]
Setting = TypeVar("Setting", bound=tuple[Any, ...])
# Log-probabilities of the ten digits, the output of the last norm layer, and the state.
Output = tuple[Float[Array, "10"], Float[Array, "..."], eqx.nn.State]


class NoNorm(eqx.Module):
    def __call__(self, x: Array, state: eqx.nn.State) -> tuple[Array, eqx.nn.State]:
        return x, state


class Small(eqx.Module):
    """Runs Equinox's tutorial CNN with a norm after the first linear layer: see issue #659."""

    conv: eqx.nn.Conv2d
    pool: eqx.nn.MaxPool2d
    linear1: eqx.nn.Linear
    norm: Any
    linear2: eqx.nn.Linear
    linear3: eqx.nn.Linear

    def __init__(self, make_norm: MakeNorm, key: PRNGKeyArray):
        keys = jax.random.split(key, 4)
        self.conv = eqx.nn.Conv2d(1, 3, kernel_size=4, key=keys[0])
        self.pool = eqx.nn.MaxPool2d(kernel_size=2)  # its stride is 1
        self.linear1 = eqx.nn.Linear(3 * 24 * 24, 512, key=keys[1])
        self.norm = make_norm(512)
        self.linear2 = eqx.nn.Linear(512, 64, key=keys[2])
        self.linear3 = eqx.nn.Linear(64, 10, key=keys[3])

    def __call__(self, image: Float[Array, "1 28 28"], state: eqx.nn.State) -> Output:
        x = jax.nn.relu(self.pool(self.conv(image)))  # [3, 24, 24]
        normed, state = self.norm(self.linear1(jnp.ravel(x)), state)
        x = jax.nn.relu(self.linear2(jax.nn.relu(normed)))
        return jax.nn.log_softmax(self.linear3(x)), normed, state


class Large(eqx.Module):
    """Applies four convolutions, each with a norm, so instability can grow with the depth."""

    convs: list[eqx.nn.Conv2d]
    norms: list[Any]
    linear: eqx.nn.Linear

    def __init__(self, make_norm: MakeNorm, key: PRNGKeyArray):
        keys = jax.random.split(key, 5)
        layers = zip((1, 16, 32, 64), (16, 32, 64, 64), (1, 2, 2, 1), keys[:4], strict=True)
        self.convs = [
            eqx.nn.Conv2d(inputs, outputs, 3, stride, padding=1, key=key)
            for inputs, outputs, stride, key in layers
        ]
        self.norms = [make_norm(conv.out_channels) for conv in self.convs]
        self.linear = eqx.nn.Linear(64, 10, key=keys[4])

    def __call__(self, image: Float[Array, "1 28 28"], state: eqx.nn.State) -> Output:
        x = normed = image
        for conv, norm in zip(self.convs, self.norms, strict=True):
            normed, state = norm(conv(x), state)
            x = jax.nn.relu(normed)
        return jax.nn.log_softmax(self.linear(x.mean(axis=(1, 2)))), normed, state


NETWORKS: dict[str, Any] = {"small": Small, "large": Large}


def batches(images: int, steps: int, seed: int) -> Iterator[NDArray[np.int64]]:
    """Yields the indices of each batch: each epoch in a new order, whole batches only."""
    random = np.random.RandomState(seed)
    epochs = (random.permutation(images) for _ in range(steps))
    starts = range(0, images - BATCH_SIZE + 1, BATCH_SIZE)
    chosen = (order[i : i + BATCH_SIZE] for order in epochs for i in starts)
    return itertools.islice(chosen, steps)


def forward(model: Any, state: eqx.nn.State, images: Float[Array, "n 1 28 28"]) -> Any:
    """Returns log-probabilities [n, 10], the output of the last norm, and the new state."""
    mapped = jax.vmap(model, axis_name=AXIS, in_axes=(0, None), out_axes=(0, 0, None))
    return mapped(images, state)


def loss_of(model: Any, state: eqx.nn.State, images: Array, labels: Int[Array, " n"]) -> Any:
    log_probabilities, normed, state = forward(model, state, images)
    of_labels = jnp.take_along_axis(log_probabilities, labels[:, None], axis=1)  # [n, 1]
    return -of_labels.mean(), (log_probabilities, normed, state)


# One compiled step is called from Python: inside a lax.scan XLA:CPU computes convolutions on
# one core, which takes 12 times as long in the large network. Seeds run one by one: as an
# ensemble under an outer vmap a step takes 1.6 (small) and 4 (large) times as long per seed.
@eqx.filter_jit
def train_step(
    model: Any, state: eqx.nn.State, memory: Any, images: Array, labels: Array
) -> tuple[Any, eqx.nn.State, Any, dict[str, Array]]:
    """Returns model, state and optimiser state after a step, and a record of the step.

    The record includes the norm of each parameter's gradient, as "gradient.conv.weight".
    """
    loss_and_gradient = eqx.filter_value_and_grad(loss_of, has_aux=True)
    (loss, (output, normed, state)), gradient = loss_and_gradient(model, state, images, labels)
    updates, memory = OPTIMISER.update(gradient, memory)
    norms = {
        "gradient" + jax.tree_util.keystr(path): jnp.linalg.norm(leaf.ravel())
        for path, leaf in jax.tree_util.tree_leaves_with_path(gradient)
    }
    recorded = {
        "loss": loss,
        "training_accuracy": (output.argmax(axis=1) == labels).mean(),
        "largest_gradient_norm": jnp.stack(list(norms.values())).max(),
        "output_mean": normed.mean(),
        "output_std": normed.std(),
        **norms,
    }
    return eqx.apply_updates(model, updates), state, memory, recorded


infer: Any = eqx.filter_jit(forward)


def accuracy_of(model: Any, state: eqx.nn.State) -> float:
    """Returns the accuracy in inference mode, on all test images."""
    images, labels = mnist.load().test
    log_probabilities, _, _ = infer(eqx.nn.inference_mode(model), state, mnist.scaled(images))
    return float((np.argmax(log_probabilities, axis=1) == labels).mean())


def run(
    made: tuple[Any, eqx.nn.State],
    seed: int,
    steps: int,
    evaluated: Container[int],
    *,
    change: Callable[[int, NDArray], NDArray] = lambda step, images: images,
    observe: Callable[[int, Any, eqx.nn.State], dict[str, Any]] = lambda *trained: {},
) -> Curves:
    """Trains a model, with its state, on MNIST; the batches depend only on the seed.

    Returns arrays [steps]: the records of `train_step`, those of `observe`, and
    "test_accuracy", which is NaN except after the `evaluated` steps. `change` may change the
    images of a step, and `observe` takes the step, the model and its state.
    """
    (model, state), data = made, mnist.load().train
    memory = OPTIMISER.init(eqx.filter(model, eqx.is_inexact_array))
    images, labels, recorded = mnist.scaled(data.images), data.labels.astype(np.int32), []
    for step, chosen in enumerate(batches(len(images), steps, seed), start=1):
        batch = jnp.asarray(change(step, images[chosen])), jnp.asarray(labels[chosen])
        model, state, memory, record = train_step(model, state, memory, *batch)
        accuracy = accuracy_of(model, state) if step in evaluated else np.nan
        recorded.append({**record, **observe(step, model, state), "test_accuracy": accuracy})
    return stack(jax.device_get(recorded))


def run_all(
    settings: Sequence[Setting], seeds: Sequence[int], run: Callable[[Setting, int], Curves]
) -> dict[Setting, Curves]:
    """Returns the curves [seeds, steps] of each setting, and shows a progress bar."""
    runs = {}
    for setting, seed in progress([*itertools.product(settings, seeds)], "run"):
        runs.setdefault(setting, []).append(run(setting, seed))
    return {setting: stack(of_seeds) for setting, of_seeds in runs.items()}


def stack(records: Sequence[dict[str, Any]]) -> Curves:
    """Stacks the values of several dictionaries along a new first axis."""
    return {name: np.array([r[name] for r in records], np.float64) for name in records[0]}
