"""Layer normalisation and its gradients: OneFlow issue #6149 with this layer and its peers.

    python -m experiments.layer_norm           the whole job: under 2 minutes, 2 cores
    python -m experiments.layer_norm --quick   under 30 seconds; fails if a claim fails

(a) The pair of that issue, [-1.83965693, -1.82964566] at eps = 1e-5: its output, and the
    gradient of the sum of its output, which is exactly 0.
(b) The gradients of weight and bias over shapes of 1 to 4 dimensions, with and without either,
    in float32, float64 and bfloat16, against extended precision. (OneFlow had exchanged them.)
(c) Layer norm made of a batch norm of the reshaped input, beside layer norm.
(d) The time it takes, as ratios.

Compared are Equinox's, Flax's and PyTorch's layers; those not installed are left out. The
issue: https://github.com/Oneflow-Inc/oneflow/issues/6149
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence

import numpy as np
from tqdm import tqdm

from . import (
    accuracy_peers,
    command,
    layer_norm_by_batch_norm,
    layer_norm_claims,
    layer_norm_figure,
    layer_norm_gradients,
    layer_norm_layers,
    layer_norm_measured,
    layer_norm_pair,
    layer_norm_speed,
    results,
)
from .layer_norm_layers import Layer
from .layer_norm_measured import Measured


@dataclasses.dataclass(frozen=True)
class Job:
    layers: tuple[Layer, ...] = layer_norm_layers.LAYERS
    dimensions: tuple[int, ...] = layer_norm_gradients.DIMENSIONS
    shapes: tuple[tuple[int, int], ...] = layer_norm_speed.SHAPES  # to time


WHOLE = Job()
# Nothing is timed: what is measured beside something else says nothing.
QUICK = Job(layer_norm_layers.ALWAYS, (1, 2), ())


def run(job: Job) -> Measured:
    packages = {layer.package for layer in job.layers}
    timings = layer_norm_speed.steps(
        packages & {"eqx_norm", "equinox", "torch"}, job.shapes, layer_norm_speed.ROUNDS
    )
    kinds = len(layer_norm_gradients.DTYPES) * len(layer_norm_gradients.AFFINE)
    with tqdm(total=kinds * len(job.dimensions), unit="batch", disable=None) as progress:
        progress.set_description("gradients")
        gradients = layer_norm_gradients.measure(job.layers, job.dimensions, progress.update)
    pair = layer_norm_pair.measure(job.layers)
    by_batch_norm = layer_norm_by_batch_norm.measure(job.layers)
    with tqdm(total=timings, unit="timing", disable=None if timings else True) as progress:
        progress.set_description("speed")
        speed = layer_norm_speed.measure(packages, job.shapes, after=progress.update)
    return Measured(pair, gradients, by_batch_norm, speed)


def report(measured: Measured) -> str:
    """All tables, for the terminal and the README alike."""
    words = {True: "holds", False: "DOES NOT HOLD", None: "not run"}
    claims = results.table(
        ("claim of this layer", "measured", "verdict"),
        [(v.claim, v.measured, words[v.holds]) for v in layer_norm_claims.judge(measured)],
    )
    layers = list(dict.fromkeys(row.layer for row in measured.pair))
    parts = (
        _pair(measured.pair),
        _gradients(measured.gradients, layers),
        _by_batch_norm(measured.by_batch_norm, layers),
        _speed(measured.speed),
        claims,
    )
    return "\n\n".join(part for part in parts if part)


def _pair(rows: Sequence[layer_norm_pair.Row]) -> str:
    return results.table(
        ("the pair in", "layer", "output", "its error", "gradient of the sum"),
        [(r.dtype, r.layer, f"{r.y:.7f}", f"{r.error:.1e}", f"{r.dx:.1e}") for r in rows],
    )


def _gradients(rows: Sequence[layer_norm_gradients.Row], layers: Sequence[str]) -> str:
    columns = (*layers, layer_norm_gradients.EXCHANGED)

    def worst(dtype: str, quantity: str, name: str) -> str:
        if quantity == "dx" and name == layer_norm_gradients.EXCHANGED:
            return ""
        of = [getattr(r, quantity) for r in rows if (r.dtype, r.layer) == (dtype, name)]
        return f"{np.nanmax(of):.1e}"

    return results.table(
        ("largest error", *columns),
        [
            (f"{quantity}, {dtype}", *(worst(dtype, quantity, name) for name in columns))
            for dtype in layer_norm_gradients.DTYPES
            for quantity in ("dweight", "dbias", "dx")
        ],
    )


def _by_batch_norm(rows: Sequence[layer_norm_by_batch_norm.Row], layers: Sequence[str]) -> str:
    found = {(row.dtype, row.layer): row.difference for row in rows}
    return results.table(
        ("layer norm - batch norm", *layers),
        [
            (dtype, *(f"{found[dtype, name]:.1e}" for name in layers))
            for dtype in layer_norm_by_batch_norm.DTYPES
        ],
    )


def _speed(rows: Sequence[layer_norm_speed.Row]) -> str:
    peers = [n for n in ("Equinox", "PyTorch") if any(row.layer == n for row in rows)]
    ratios = {peer: layer_norm_speed.ratios(rows, peer) for peer in peers}
    keys = dict.fromkeys((row.dtype, row.program) for row in rows)
    shapes = list(dict.fromkeys(row.shape for row in rows))
    if not shapes:
        return ""
    return results.table(
        ("time, this layer over", *(f"{n}x{values}" for n, values in shapes)),
        [
            (
                f"{peer}, {dtype}, {program}",
                *(f"{ratios[peer][shape, dtype, program]:.2f}" for shape in shapes),
            )
            for peer in peers
            for dtype, program in keys
        ],
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    job = QUICK if options.quick else WHOLE
    missing = accuracy_peers.missing(layer.package for layer in job.layers)
    for package in missing:
        print(f"{package} is not installed: left out (make experiments has it)")
    here = tuple(layer for layer in job.layers if layer.package not in missing)
    job = dataclasses.replace(job, layers=here)
    out = command.folder(parser, options, whole=job == WHOLE)
    folder = out / "results"
    started = time.perf_counter()
    measured = run(job)
    means = layer_norm_pair.at_means(job.layers)
    seconds = round(time.perf_counter() - started, 1)
    verdicts = layer_norm_claims.judge(measured)
    layer_norm_measured.save(folder, measured, means)
    figure = layer_norm_figure.draw(out)
    packages = sorted({layer.package for layer in job.layers} & {"flax", "torch"})
    results.write_json(
        folder / "layer_norm.json",
        {
            "environment": results.environment(*packages),
            "left out": missing,
            "seconds": seconds,
            "claims": [verdict._asdict() for verdict in verdicts],
        },
    )
    print(f"\n{report(measured)}\n")
    print(f"in {seconds} s; results in {folder}, figure:\n  {figure}")
    return int(options.quick and any(verdict.holds is False for verdict in verdicts))


def _parser() -> argparse.ArgumentParser:
    parser = command.parser(
        "layer_norm",
        __doc__,
        quick="fewer shapes, no peers but Equinox, nothing timed; exits with 1 if a claim does "
        "not hold",
        whole="the whole job with every peer",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
