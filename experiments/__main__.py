"""Writes experiments/README.md and the table in the README, from experiments/results/*.json."""

import argparse
import json
from pathlib import Path
from typing import Any

from .common.report import table

FOLDER = Path(__file__).parent
README = FOLDER.parent / "README.md"
BEGIN, END = "<!-- experiments:begin -->\n", "<!-- experiments:end -->"
# As a reader asks: first what a layer does to training, then how exact and how fast it is.
ORDER = [
    "stability",
    "stability_large",
    "variance_clipping",
    "small_batches",
    "state_consistency",
]
ORDER += ["layer_norm", "accuracy", "determinism", "distributed", "speed", "compiled"]

HEAD = """# What the experiments found

Each is one script, run as `python -m experiments.NAME`, which writes below `build/`; `--help`
says what it does. `make experiments` writes what is here; [results/](results/) has all numbers,
and with which processor, device and versions they were measured.
"""
CLAIMS = """
A claim is what this project says of itself; all of them hold, or `--quick` fails. What is aimed
at, and not always reached, is the [last table](#aimed-at)."""
GOALS = """
## Aimed at

These are goals, not claims, with what is in the way: [docs/design.md](../docs/design.md).
"""


def results() -> dict[str, Any]:
    """Returns what each experiment has published, by name."""
    paths = {path.stem: path for path in sorted((FOLDER / "results").glob("*.json"))}
    names = [*filter(paths.__contains__, ORDER), *(name for name in paths if name not in ORDER)]
    return {name: json.loads(paths[name].read_text(encoding="utf-8")) for name in names}


def figures(name: str) -> list[Path]:
    """Returns the figures of an experiment, and not those of one whose name begins alike."""
    others = [other for other in results() if other.startswith(name) and other != name]
    found = sorted((FOLDER / "figures").glob(f"{name}*.png"))
    return [path for path in found if not path.stem.startswith(tuple(others))]


def overview(folder: str) -> str:
    """Returns the table of all experiments; `folder` is where it finds their files."""
    lines = []
    for name, result in results().items():
        drawn = figures(name)
        link = f"[figure]({folder}figures/{drawn[0].name})" if drawn else "-"
        holding = sum(holds for _, _, holds in result["verdicts"])
        claims = f"{holding} of {len(result['verdicts'])}"
        where = f"[{name}]({folder and folder + 'README.md'}#{name})"
        lines.append((where, result["asked"], result["answer"], claims, link))
    return table(("experiment", "asked", "answer", "claims that hold", "figure"), lines)


def document() -> str:
    """Returns the text of experiments/README.md."""
    parts, goals = [HEAD, overview(""), CLAIMS], []
    for name, result in results().items():
        parts += [f"\n## {name}", f"\n{result['asked']} {result['answer']}."]
        parts += [f"\n![{path.stem}](figures/{path.name})" for path in figures(name)]
        parts += ["\n" + "\n".join(lines) for lines in result["shown"]]
        goals += [(name, *goal) for goal in result["goals"]]
    if goals:
        header = ("experiment", "aimed at", "measured", "what limits it")
        parts += [GOALS, table(header, goals)]
    return "\n".join(parts) + "\n"


def main() -> None:
    argparse.ArgumentParser("python -m experiments", description=__doc__).parse_args()
    (FOLDER / "README.md").write_text(document(), encoding="utf-8")
    before, rest = README.read_text(encoding="utf-8").split(BEGIN)
    text = before + BEGIN + overview("experiments/") + "\n" + END + rest.split(END)[1]
    README.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
