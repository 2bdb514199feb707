"""Shows what the experiments found, from the committed results; measures nothing.

    python -m experiments              tells of every experiment which claims hold
    python -m experiments --write      writes experiments/README.md, and the README's table
    python -m experiments --redraw     draws every committed figure anew

To measure, run one of them: python -m experiments.NAME --help.
"""

import importlib
import sys
from collections.abc import Iterator, Sequence

from .lab import figures
from .lab.experiment import COMMITTED, Experiment, Files, Report, parser
from .lab.tables import table

DOCUMENT, README = COMMITTED / "README.md", COMMITTED.parent / "README.md"
BEGIN, END = "<!-- threads:begin -->\n", "<!-- threads:end -->"
HEAD = """# What the experiments found

Every table and verdict below is made of the files in [results/](results/) by
`python -m experiments --write`. The `.json` beside them says with which processor, device and
versions they were measured. `python -m experiments.NAME` measures one anew, below `build/`;
`make experiments` measures all of them, and replaces what is here.
"""


def experiments() -> Iterator[Experiment]:
    """Yields every experiment, by name."""
    for path in sorted(COMMITTED.glob("*/__main__.py")):
        yield importlib.import_module(f".{path.parent.name}.__main__", __package__).EXPERIMENT


def reports() -> Iterator[tuple[Experiment, Files, Report]]:
    """Yields the report of each of the committed results."""
    for experiment in experiments():
        for stem in experiment.stems(COMMITTED):
            files = Files(COMMITTED, stem)
            yield experiment, files, experiment.report(files)


def document() -> str:
    """Returns the text of experiments/README.md."""
    parts = [HEAD]
    for experiment, files, report in reports():
        title, *_ = (experiment.about or "").split("\n\n")
        drawn = sorted((COMMITTED / "figures").glob(f"{files.stem}*.png"))
        pictures = "".join(f"\n![{p.stem}](figures/{p.name})\n" for p in drawn)
        tables = report.summary or report.text
        parts.append(f"## {files.stem}\n\n{title}\n{pictures}\n{tables}\n")
    return "\n".join(parts)


def verdicts(report: Report) -> tuple[str, str]:
    """Returns how many claims hold of those that were judged, and which do not."""
    judged = [verdict for verdict in report.verdicts if verdict.holds is not None]
    fail = [verdict.claim for verdict in judged if not verdict.holds]
    return f"{len(judged) - len(fail)} of {len(judged)}", "; ".join(fail) or "-"


def threads() -> str:
    """Returns the README's table: one row for each of the committed results."""
    lines = ["| thread | claims that hold | this package | its peers | does not hold |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for experiment, files, report in reports():
        hold, fail = verdicts(report)
        # One experiment may have several results: the second's stem says how it differs.
        which = files.stem.removeprefix(experiment.name).replace("_", ", ").replace("-", " ")
        link = f"[{hold}](experiments/README.md#{files.stem})"
        thread = experiment.thread + which
        cells = (thread, link, report.ours or "-", report.peers or "-", fail)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def with_threads(readme: str) -> str:
    """Returns the text of the README with the newest table."""
    before, rest = readme.split(BEGIN)
    return before + BEGIN + threads() + END + rest.split(END)[1]


def main(arguments: Sequence[str] | None = None) -> int:
    made = parser("", __doc__)
    made.add_argument("--write", action="store_true", help="writes both documents' tables")
    made.add_argument("--redraw", action="store_true", help="draws the committed figures")
    options = made.parse_args(arguments)
    if options.write:
        DOCUMENT.write_text(document(), encoding="utf-8")
        README.write_text(with_threads(README.read_text(encoding="utf-8")), encoding="utf-8")
    if options.redraw:
        with figures.style():
            for experiment, files, _ in reports():
                print(*experiment.draw(files), sep="\n")
    if not (options.write or options.redraw):
        rows = [(files.stem, *verdicts(report)) for _, files, report in reports()]
        print(table(("results", "claims that hold", "does not hold"), rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
