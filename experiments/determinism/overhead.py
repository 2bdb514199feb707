"""Measures what probes cost: a step on MNIST with every layer monitored, over one without.

The step is that of `lab.training`: forward, backward, Adam. Monitored are what each layer
returns and its cotangent. The programs are timed in turn, in rounds, and a ratio is that of two
timings of one round.

Five of them have probes, so that it shows what costs what: the fingerprints as outputs of the
step, and a ledger that is written with them; a callback that throws them away, one that writes
them, and one that also waits for the disk.
"""

import itertools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from eqx_norm import BatchNorm
from eqx_norm.determinism import Ledger, monitor_module, recorded, recorded_into
from experiments.lab import mnist, timer, training
from experiments.lab.networks import NETWORKS
from experiments.lab.timer import Program

RETURNED, APPENDED = "outputs", "outputs, into a ledger"
IGNORED, UNSYNCED = "callbacks to nowhere", "callbacks, into a ledger without fsync"
CALLED_BACK = "callbacks, into a ledger"


class Overhead(NamedTuple):
    network: str  # of networks.NETWORKS
    transport: str
    step: float  # milliseconds without probes, the median
    median: float  # of the ratio of a round; and its 10th and 90th percentile
    low: float
    high: float
    probes: int
    bytes: int  # that leave the device for all probes of a step
    callbacks: int  # of a step
    unchanged: bool  # whether the step gives the same bits as without probes


class _Counted(Ledger):
    """Knows how often it was written to, and need not take what is written."""

    writes, takes = 0, True

    def append(self, *args: Any, **kwargs: Any) -> None:
        self.writes += 1
        if self.takes:
            super().append(*args, **kwargs)


def measure(rounds: int, network: str) -> list[Overhead]:
    """Returns one for each transport."""
    plain = _arguments(network, lambda model: model)
    probed = _arguments(network, monitor_module)
    steps = itertools.count()
    returned = eqx.filter_jit(recorded(training.step))
    with tempfile.TemporaryDirectory() as folder, Ledger(Path(folder, "a")) as appended:
        called = _Counted(Path(folder, "b"))
        into_ledger = eqx.filter_jit(recorded_into(called, training.step))

        def append() -> Any:
            output, record = returned(*probed)
            appended.append(next(steps), record)
            return output

        def call_back(takes: bool = True) -> Any:
            called.takes = takes
            result = into_ledger(jnp.asarray(next(steps)), *probed)
            jax.block_until_ready(result)
            jax.effects_barrier()
            return result

        def call_back_without_fsync() -> Any:
            with mock.patch.object(os, "fsync"):
                return call_back()

        programs = {
            "": Program(lambda: training.step(*plain)),
            RETURNED: Program(lambda: returned(*probed)),
            APPENDED: Program(append),
            IGNORED: Program(lambda: call_back(takes=False)),
            UNSYNCED: Program(call_back_without_fsync),
            CALLED_BACK: Program(call_back),
        }
        times = timer.interleave(programs, rounds, title=f"probes, {network} network")
        output, record = returned(*probed)
        before = called.writes
        from_callbacks = call_back()
        callbacks = called.writes - before
        called.close()
    expected = training.step(*plain)
    step = times.pop("").seconds
    found = []
    for transport, time in times.items():
        is_callback = transport not in (RETURNED, APPENDED)
        low, median, high = map(float, np.percentile(time.seconds / step, (10, 50, 90)))
        found.append(
            Overhead(
                network,
                transport,
                1e3 * float(np.median(step)),
                median,
                low,
                high,
                probes=len(record.fingerprints),
                bytes=sum(leaf.nbytes for leaf in jax.tree.leaves(record)),
                callbacks=callbacks if is_callback else 0,
                unchanged=_same_bits(from_callbacks if is_callback else output, expected),
            )
        )
    return found


def _arguments(network: str, wrap: Callable[[Any], Any]) -> tuple[Any, ...]:
    """Returns what a training step is called with."""

    def make_norm(channels: int) -> BatchNorm:
        return BatchNorm(channels, training.AXIS, approach="batch")

    model, state = eqx.nn.make_with_state(NETWORKS[network])(make_norm, jax.random.key(0))
    model = wrap(model)
    data = mnist.load().train
    images = jnp.asarray(mnist.scaled(data.images[: training.BATCH_SIZE]))
    labels = jnp.asarray(data.labels[: training.BATCH_SIZE], jnp.int32)
    optimiser_state = training.OPTIMISER.init(eqx.filter(model, eqx.is_inexact_array))
    return model, state, optimiser_state, images, labels, training.no_probe


def _same_bits(tree: Any, other: Any) -> bool:
    leaves = (jax.tree.leaves(eqx.filter(t, eqx.is_array)) for t in (tree, other))
    return all(
        np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in zip(*leaves, strict=True)
    )
