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
from typing import Any

from experiments.lab import rows
from experiments.lab.claims import judge, verdicts_table
from experiments.lab.experiment import Experiment, Files, Report
from experiments.lab.tables import grid, listing

from . import figures, overhead, run, runs
from .claims import CLAIMS, Measured, by_setting, described, parting
from .overhead import Overhead
from .runs import FAULT, NO_SEED, RECIPE, Job, Probe, Result

# What the claims compare, in the fewest runs.
QUICK = Job(
    names=(NO_SEED, RECIPE, FAULT),
    repeats=2,
    steps=8,
    flipped_at=5,
    timed=(),
)


def measure(job: Job, files: Files) -> dict[str, Any]:
    found, probes = runs.measure(job.settings)
    # Alone on the machine, or the times would say nothing.
    times = [row for network in job.timed for row in overhead.measure(job.rounds, network)]
    rows.save(files.csv(), Result, found)
    rows.save(files.csv("_probes"), Probe, probes)
    rows.save(files.csv("_overhead"), Overhead, times)
    return {"seed": run.SEED, "threads of the recipe": run.CPU_THREADS, "steps": job.steps}


TIMES = {
    "network": "{network}",
    "probes by": "{transport}",
    "of a step without": "{median:.3f}",
    "10% to 90%": "{low:.3f} to {high:.3f}",
    "probes": "{probes}",
    "bytes": "{bytes}",
    "callbacks": "{callbacks}",
}


def report(files: Files) -> Report:
    measured = Measured(
        rows.load(files.csv(), Result),
        rows.load(files.csv("_overhead"), Overhead),
    )
    verdicts = judge(CLAIMS, measured)
    of_settings = by_setting(measured.results)
    settings = grid(
        f"MNIST, {len(measured.results[0].by_step)} steps",
        of_settings,
        {"gave": described, "parts from the first at": parting},
        lambda found, column: column(found),
    )
    tables = verdicts_table(verdicts), settings, listing(measured.overhead, TIMES)
    return Report(
        "\n\n".join(tables),
        verdicts,
        ours=f"the recipe: {described(of_settings[RECIPE])}",
        peers=f"no seed: {described(of_settings.get(NO_SEED, []))}",
    )


EXPERIMENT = Experiment(
    name="determinism",
    about=__doc__,
    thread="Riach, GTC 2019: [the same bits again](docs/determinism.md)",
    whole=Job(),
    quick=QUICK,
    measure=measure,
    report=report,
    draw=figures.draw,
)

if __name__ == "__main__":
    sys.exit(EXPERIMENT.main())
