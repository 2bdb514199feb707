"""Runs that agree to the last bit: with a seed, with the recipe, on more devices, with a fault.

    python -m experiments.determinism           the whole job: under 4 minutes, 2 cores
    python -m experiments.determinism --quick   under 30 seconds; fails if a claim fails

The table of D. Riach's talk, "Determinism in Deep Learning" (GTC 2019, S9911), for JAX: the
network of the stability experiment is trained on MNIST again and again, each time in a process
of its own, and compared by the sum of its weights, their fingerprint and its final loss. In
all runs, its layers, their gradients and its weights have probes, so that runs which differ are
not only told to: `eqx_norm.determinism.compare` names the first value that does.

What is varied: whether NumPy's generator, which shuffles the images, has a seed; the number of
threads and of cores; `eqx_norm.determinism.deterministic`; the number of devices, over which
each batch is cut up; and one bit of one weight. All of it runs on a CPU, whose devices are
forced by a flag of XLA's.
"""

import sys
import time
from collections.abc import Sequence

from tqdm import tqdm

from . import (
    command,
    determinism_claims,
    determinism_figure,
    determinism_overhead,
    determinism_run,
    determinism_runs,
    results,
)
from .determinism_claims import Verdict
from .determinism_overhead import ROUNDS, Overhead
from .determinism_runs import Result
from .determinism_settings import QUICK, Job


def run(job: Job) -> tuple[list[Result], list[str], list[Overhead]]:
    settings = job.settings
    with tqdm(total=determinism_runs.count(settings), unit="run", disable=None) as progress:
        found, probes = determinism_runs.measure(settings, progress.update)
    # Alone on the machine, or the times would say nothing.
    return found, probes, [*_timed("small"), *_timed("large")] if job.timed else []


def _timed(network: str) -> list[Overhead]:
    total = determinism_overhead.timings(ROUNDS)
    with tqdm(total=total, unit="step", desc=network, disable=None) as progress:
        return determinism_overhead.measure(ROUNDS, network, progress.update)


def report(
    found: Sequence[Result], overhead: Sequence[Overhead], verdicts: Sequence[Verdict]
) -> str:
    """All tables."""
    words = {True: "holds", False: "DOES NOT HOLD", None: "not run"}
    runs = results.table(
        ("", "run", "sum of weights", "fingerprint", "final loss"),
        [tuple(map(str, row[:5])) for row in found],
    )
    times = results.table(
        (
            "network",
            "probes by",
            "of a step without",
            "10% to 90%",
            "probes",
            "bytes",
            "callbacks",
        ),
        [
            (
                row.network,
                row.transport,
                f"{row.median:.3f}",
                f"{row.low:.3f} to {row.high:.3f}",
                *map(str, (row.probes, row.bytes, row.callbacks)),
            )
            for row in overhead
        ],
    )
    claims = results.table(
        ("claim", "measured", "verdict"),
        [(v.claim, v.measured, words[v.holds]) for v in verdicts],
    )
    return "\n\n".join(
        [runs, summary(found), times, claims] if overhead else [runs, summary(found), claims]
    )


def summary(found: Sequence[Result]) -> str:
    """Setting by setting, for the README as well."""
    return results.table(
        ("MNIST, 100 steps", "gave", "parts from the first at"),
        [
            (name, determinism_claims.described(rows), determinism_claims.parting(rows))
            for name, rows in determinism_claims.by_setting(found).items()
        ],
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.parser(
        "determinism",
        __doc__,
        quick="fewer and shorter runs, nothing timed; exits with 1 if a claim does not hold",
        whole="the whole job",
    )
    options = parser.parse_args(arguments)
    job = QUICK if options.quick else Job()
    out = command.folder(parser, options, whole=job == Job())
    folder = out / "results"
    started = time.perf_counter()
    found, probes, overhead = run(job)
    seconds = round(time.perf_counter() - started, 1)
    verdicts = determinism_claims.judge(found, probes, job.flipped_at, overhead)
    determinism_runs.save(folder / "determinism.csv", found)
    results.write_csv(
        folder / "determinism_probes.csv", ("probe",), [(name,) for name in probes]
    )
    if overhead:
        path = folder / "determinism_overhead.csv"
        results.write_csv(path, Overhead._fields, overhead)
    figure = determinism_figure.draw(out)
    results.write_json(
        folder / "determinism.json",
        {
            "environment": results.environment("optax"),
            "seed": determinism_run.SEED,
            "threads of the recipe": determinism_run.CPU_THREADS,
            "steps": job.steps,
            "seconds": seconds,
            "claims": [verdict._asdict() for verdict in verdicts],
        },
    )
    print(f"\n{report(found, overhead, verdicts)}\n")
    print(f"in {seconds} s; results in {folder}, figure:\n  {figure}")
    return int(options.quick and any(verdict.holds is False for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
