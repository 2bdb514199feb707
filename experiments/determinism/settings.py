"""Says which runs there are: what is varied, and what is kept."""

from dataclasses import dataclass, replace

from .run import Run

NO_SEED = "no seed"
SEED = "a seed"
THREADS = "a seed, other threads"
RECIPE = "the recipe"
ON_TWO = "the recipe, 2 devices"
DEVICES = "the recipe, other devices"
INVARIANT = "device_invariant, other devices"
FAULT = "the recipe, one bit flipped"

ALL = (NO_SEED, SEED, THREADS, RECIPE, ON_TWO, DEVICES, INVARIANT, FAULT)


@dataclass(frozen=True)
class Job:
    """Says what to run. The defaults are the whole job."""

    names: tuple[str, ...] = ALL
    repeats: int = 5  # as in the talk
    steps: int = 100
    threads: tuple[int, ...] = (2, 1, 3, 4, 8)
    devices: tuple[int, ...] = (1, 2, 4, 8)
    flipped_at: int = 37
    timed: tuple[str, ...] = ("small", "large")  # of networks.NETWORKS
    rounds: int = 100  # of timing

    @property
    def settings(self) -> dict[str, dict[str, Run]]:
        """Returns the runs of each setting, by what they differ in."""
        run = Run(self.steps)
        recipe = replace(run, recipe=True)
        invariant = replace(recipe, implementation="device_invariant")
        flipped = replace(recipe, flipped_at=self.flipped_at)
        settings = {
            NO_SEED: self._repeated(replace(run, seeded=False)),
            SEED: self._repeated(run),
            THREADS: {_number(n, "thread"): replace(run, threads=n) for n in self.threads},
            RECIPE: {
                **self._repeated(recipe, less=1),
                "on one core": replace(recipe, cores=1),
            },
            ON_TWO: self._repeated(replace(recipe, devices=2)),
            DEVICES: self._over_devices(recipe),
            INVARIANT: self._over_devices(invariant),
            FAULT: {"as it is": recipe, f"before step {self.flipped_at}": flipped},
        }
        return {name: settings[name] for name in self.names}

    def _repeated(self, run: Run, less: int = 0) -> dict[str, Run]:
        return {f"run {i}": run for i in range(1, self.repeats - less + 1)}

    def _over_devices(self, run: Run) -> dict[str, Run]:
        return {_number(n, "device"): replace(run, devices=n) for n in self.devices}


def _number(number: int, what: str) -> str:
    return f"{number} {what}" + "s" * (number > 1)
