"""Trains a BatchNorm in the way of each peer's, and writes and reads golden files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

EPS, MOMENTUM = 1e-5, 0.9  # the weight of the past, which PyTorch counts as 0.1
SHAPE = (4, 3, 6, 5)  # of all arrays, also Flax's: channels are axis 1
# So small that weight and bias, which walk at random for 100 steps, stay of order 1.
LEARNING_RATE = 0.01
RECORDED = (1, 2, 3, 10, 50, 100)
# Drawn once; the golden files have the batches of these seeds.
SEEDS = {"torch": 2569079486, "flax": 1820740916}

Arrays = dict[str, np.ndarray]
# (weight and bias by name; a batch; the gradient of its output; the probe) to what the layer
# gives for them, by name.
Step = Callable[[Arrays, np.ndarray, np.ndarray, np.ndarray], dict[str, Any]]


def record(peer: str, step: Step) -> Arrays:
    """Returns what `step` gave at the recorded steps, stacked, of 100 steps of SGD.

    The batches differ in mean and scale. Not `step` but this function moves weight and bias, so
    that every layer is trained in the same way.
    """
    random, channels = np.random.RandomState(SEEDS[peer]), SHAPE[1]

    def uniform(low: float, high: float, *shape: int) -> np.ndarray:
        return random.uniform(low, high, shape).astype(np.float32)

    def batch() -> np.ndarray:
        mean, std = uniform(-2, 2, channels, 1, 1), uniform(0.5, 2, channels, 1, 1)
        return mean + std * random.standard_normal(SHAPE).astype(np.float32)

    affine = {"weight": uniform(0.5, 1.5, channels), "bias": uniform(-1, 1, channels)}
    probe, recorded = batch(), []
    for k in range(1, max(RECORDED) + 1):
        x, dy = batch(), random.standard_normal(SHAPE).astype(np.float32)
        # Copies, because some of these may be views of what the next step overwrites.
        outputs = {name: np.array(v) for name, v in step(affine, x, dy, probe).items()}
        affine = {
            name: value - LEARNING_RATE * outputs[f"d{name}"] for name, value in affine.items()
        }
        if k in RECORDED:
            recorded.append(outputs)
    return {name: np.stack([step[name] for step in recorded]) for name in recorded[0]}


def write(peer: str, arrays: Arrays, version: str) -> None:
    content: dict[str, Any] = {**arrays, "version": np.array(version)}
    # Not compressed: the values are random, and zlib's bytes depend on its version.
    np.savez(Path(__file__).parent / f"{peer}.npz", **content)


def golden(peer: str) -> Arrays:
    """Returns the arrays of the golden file."""
    with np.load(Path(__file__).parent / f"{peer}.npz") as file:
        return {name: file[name] for name in file if name != "version"}
