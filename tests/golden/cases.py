"""Lists the cases in which BatchNorm equals its peers, and writes and reads golden files."""

import dataclasses
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

EPS = 1e-5
# So small that weight and bias, which walk at random for 100 steps, stay of order 1.
LEARNING_RATE = 0.01
RECORDED = (1, 2, 3, 10, 50, 100)
FOLDER = Path(__file__).parent

Arrays = dict[str, np.ndarray]
# (weight and bias by name, or {}; a batch; the gradient of its output; the probe) to what
# the layer gives for them, by name.
Step = Callable[[Arrays, np.ndarray, np.ndarray, np.ndarray], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Case:
    """Names a layer as its peer does, with `momentum` as the peer counts it.

    `shape` has the channels first, and so have all recorded arrays, also Flax's.
    """

    peer: str
    layer: str
    shape: tuple[int, ...]
    momentum: float
    affine: bool = True

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape))
        return f"{self.layer}-{shape}-{self.momentum}{'' if self.affine else '-plain'}"

    @property
    def channels(self) -> int:
        return self.shape[1]


CASES = (
    Case("torch", "BatchNorm1d", (8, 5), 0.1),
    Case("torch", "BatchNorm1d", (8, 5), 0.01, affine=False),
    Case("torch", "BatchNorm1d", (6, 5, 7), 0.01),
    Case("torch", "BatchNorm2d", (4, 3, 6, 5), 0.1),
    Case("torch", "BatchNorm3d", (2, 3, 2, 4, 3), 0.01),
    Case("flax", "linen", (8, 5), 0.9),
    Case("flax", "linen", (8, 5), 0.99, affine=False),
    Case("flax", "linen", (6, 5, 7), 0.99),
    Case("flax", "linen", (4, 3, 6, 5), 0.9),
)


def record(case: Case, step: Step) -> Arrays:
    """Returns what `step` gave at the recorded steps, stacked, of 100 steps of SGD.

    The batches differ in mean and scale. Not `step` but this function moves weight and bias, so
    that every layer is trained in the same way.
    """
    # Drawn per case, so that a new case leaves the inputs of the others as they are.
    random = np.random.RandomState(zlib.crc32(str(case).encode()))
    per_channel = (case.channels, *(1,) * (len(case.shape) - 2))

    def uniform(low: float, high: float, shape: tuple[int, ...]) -> np.ndarray:
        return random.uniform(low, high, shape).astype(np.float32)

    def batch() -> np.ndarray:
        mean, std = uniform(-2, 2, per_channel), uniform(0.5, 2, per_channel)
        return mean + std * random.standard_normal(case.shape).astype(np.float32)

    affine: Arrays = {}
    if case.affine:
        affine["weight"] = uniform(0.5, 1.5, (case.channels,))
        affine["bias"] = uniform(-1, 1, (case.channels,))
    probe = batch()
    recorded = []
    for k in range(1, max(RECORDED) + 1):
        x, dy = batch(), random.standard_normal(case.shape).astype(np.float32)
        # Copies, because some of these may be views of what the next step overwrites.
        outputs = {name: np.array(v) for name, v in step(affine, x, dy, probe).items()}
        affine = {
            name: value - LEARNING_RATE * outputs[f"d{name}"] for name, value in affine.items()
        }
        if k in RECORDED:
            recorded.append(outputs)
    return {name: np.stack([step[name] for step in recorded]) for name in recorded[0]}


def write(peer: str, run: Callable[[Case], Arrays], version: str) -> None:
    content: dict[str, Any] = {}
    for case in CASES:
        if case.peer == peer:
            content |= {f"{case}/{name}": array for name, array in run(case).items()}
    # Not compressed: the values are random, and zlib's bytes depend on its version.
    np.savez(FOLDER / f"{peer}.npz", **content, version=np.array(version))


def golden(case: Case) -> Arrays:
    """Returns what `run(case)` gave when the golden file was written."""
    prefix = f"{case}/"
    with np.load(FOLDER / f"{case.peer}.npz") as file:
        return {n.removeprefix(prefix): file[n] for n in file if n.startswith(prefix)}
