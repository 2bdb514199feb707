"""Measures what probes cost: a step on MNIST with every layer monitored, over one without.

The step is that of `lab.training`: forward, backward, Adam. Monitored are what each layer
returns and its cotangent. The fingerprints are outputs of the step, which may be written to a
ledger, or a callback writes them. The programs are timed in turn, in rounds, and a ratio is
that of two timings of one round.
"""

import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from eqx_norm import BatchNorm
from eqx_norm.determinism import Ledger, monitor_module, recorded, recorded_into
from experiments.lab import mnist, timer, training
from experiments.lab.networks import NETWORKS

RETURNED, APPENDED = "outputs", "outputs, into a ledger"
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
    """Knows how often it was written to."""

    writes = 0

    def append(self, *args: Any, **kwargs: Any) -> None:
        self.writes += 1
        super().append(*args, **kwargs)


def measure(rounds: int, network: str) -> list[Overhead]:
    """Returns one for each transport."""
    plain = _arguments(network, lambda model: model)
    probed = _arguments(network, monitor_module)
    expected = _bits(training.step(*plain))
    steps = itertools.count()
    returned = eqx.filter_jit(recorded(training.step))
    with tempfile.TemporaryDirectory() as folder, Ledger(Path(folder, "a")) as appended:
        called = _Counted(Path(folder, "b"))
        into_ledger = eqx.filter_jit(recorded_into(called, training.step))

        def append() -> Any:
            output, record = returned(*probed)
            appended.append(next(steps), record)
            return output, record

        def call_back() -> Any:
            output = into_ledger(jnp.asarray(next(steps)), *probed)
            jax.block_until_ready(output)
            jax.effects_barrier()
            return output, ()

        with_probes = {
            RETURNED: lambda: returned(*probed),
            APPENDED: append,
            CALLED_BACK: call_back,
        }
        programs = {"": lambda: training.step(*plain), **with_probes}
        times = timer.interleave(
            {name: timer.Program(program) for name, program in programs.items()},
            rounds,
            title=f"probes, {network} network",
        )
        _, record = returned(*probed)
        found = []
        for transport, program in with_probes.items():
            before = called.writes
            output, _ = program()
            step = times[""].seconds
            ratios = np.percentile(times[transport].seconds / step, (50, 10, 90))
            found.append(
                Overhead(
                    network,
                    transport,
                    1e3 * float(np.median(step)),
                    *map(float, ratios),
                    probes=len(record.fingerprints),
                    bytes=sum(leaf.nbytes for leaf in jax.tree.leaves(record)),
                    callbacks=called.writes - before,
                    unchanged=_bits(output) == expected,
                )
            )
        called.close()
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


def _bits(tree: Any) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(eqx.filter(tree, eqx.is_array))]
