"""What is varied in the determinism experiment, and what is kept."""

import dataclasses

from .determinism_run import Run
from .determinism_runs import Setting

NO_SEED = "no seed"
SEED = "a seed"
THREADS = "a seed, other threads"
RECIPE = "the recipe"
ON_TWO = "the recipe, 2 devices"
DEVICES = "the recipe, other devices"
INVARIANT = "device_invariant, other devices"
FAULT = "the recipe, one bit flipped"


ALL = (NO_SEED, SEED, THREADS, RECIPE, ON_TWO, DEVICES, INVARIANT, FAULT)


@dataclasses.dataclass(frozen=True)
class Job:
    """What to run. The defaults are the whole job."""

    names: tuple[str, ...] = ALL
    repeats: int = 5  # as in the talk
    steps: int = 100
    threads: tuple[int, ...] = (2, 1, 3, 4, 8)
    devices: tuple[int, ...] = (1, 2, 4, 8)
    flipped_at: int = 37
    timed: bool = True

    @property
    def settings(self) -> list[Setting]:
        run = Run(self.steps)
        recipe = dataclasses.replace(run, recipe=True)
        on_one_core, flipped = (
            dataclasses.replace(recipe, cores=1),
            dataclasses.replace(recipe, flipped_at=self.flipped_at),
        )
        several = {
            NO_SEED: self._repeated(dataclasses.replace(run, seeded=False)),
            SEED: self._repeated(run),
            THREADS: {
                _number(n, "thread"): dataclasses.replace(run, threads=n) for n in self.threads
            },
            RECIPE: {**self._repeated(recipe, -1), "on one core": on_one_core},
            ON_TWO: self._repeated(dataclasses.replace(recipe, devices=2)),
            DEVICES: self._over_devices(recipe),
            INVARIANT: self._over_devices(
                dataclasses.replace(recipe, implementation="device_invariant")
            ),
            FAULT: {"as it is": recipe, f"before step {self.flipped_at}": flipped},
        }
        return [
            Setting(name, tuple(several[name].values()), tuple(several[name]))
            for name in self.names
        ]

    def _repeated(self, run: Run, more: int = 0) -> dict[str, Run]:
        return {f"run {i}": run for i in range(1, self.repeats + more + 1)}

    def _over_devices(self, run: Run) -> dict[str, Run]:
        return {_number(n, "device"): dataclasses.replace(run, devices=n) for n in self.devices}


# What the claims compare, in the fewest runs.
QUICK = Job(
    names=(NO_SEED, RECIPE, INVARIANT, FAULT),
    repeats=2,
    steps=8,
    devices=(1, 2),
    flipped_at=5,
    timed=False,
)


def _number(number: int, what: str) -> str:
    return f"{number} {what}" + "s" * (number > 1)
