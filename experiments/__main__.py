"""Shows what the experiments found, from the committed results; measures nothing.

    python -m experiments              lists the experiments, and where each claim stands
    python -m experiments --write      writes experiments/README.md: every table
    python -m experiments --redraw     draws every committed figure anew

To measure, run one of them: python -m experiments.NAME --help.
"""

import importlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from .lab import figures
from .lab.experiment import COMMITTED, Experiment, Files, parser
from .lab.tables import table

DOCUMENT = COMMITTED / "README.md"
HEAD = """# What the experiments found

Every table and verdict below is made of the files in `results/` by `python -m experiments
--write`; each file names the processor, the device and the versions it was measured with
(`.json`). To measure one anew: `python -m experiments.NAME --help`; all of them: `make
experiments`.
"""


def experiments() -> Iterator[Experiment]:
    """Yields every experiment, by name."""
    for path in sorted(COMMITTED.glob("*/__main__.py")):
        yield importlib.import_module(f".{path.parent.name}.__main__", __package__).EXPERIMENT


def document() -> str:
    """Returns the text of experiments/README.md."""
    parts = [HEAD]
    for experiment in experiments():
        assert experiment.about is not None
        title, *_ = experiment.about.split("\n\n")
        for stem in experiment.stems(COMMITTED):
            report = experiment.report(Files(COMMITTED, stem))
            parts.append(f"## {stem}\n\n{title}\n\n{report.summary or report.text}\n")
    return "\n".join(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    made = parser("", __doc__)
    made.prog = "python -m experiments"
    made.add_argument("--write", action="store_true", help="writes experiments/README.md")
    made.add_argument("--redraw", action="store_true", help="draws the committed figures")
    options = made.parse_args(arguments)
    if options.write:
        DOCUMENT.write_text(document(), encoding="utf-8")
        print(DOCUMENT)
    elif options.redraw:
        for drawn in _redrawn():
            print(drawn)
    else:
        print(_overview())
    return 0


def _redrawn() -> Iterator[Path]:
    for experiment in experiments():
        for stem in experiment.stems(COMMITTED):
            with figures.style():
                yield from experiment.draw(Files(COMMITTED, stem))


def _overview() -> str:
    rows = []
    for experiment in experiments():
        for stem in experiment.stems(COMMITTED):
            verdicts = experiment.report(Files(COMMITTED, stem)).verdicts
            fail = [v.claim for v in verdicts if v.holds is False]
            hold = sum(verdict.holds is True for verdict in verdicts)
            rows.append((stem, f"{hold} of {len(verdicts)}", "; ".join(fail) or "-"))
    return table(("results", "claims that hold", "claims that do not"), rows)


if __name__ == "__main__":
    sys.exit(main())
