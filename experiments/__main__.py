"""Writes experiments/README.md from experiments/results/*.json."""

import argparse
import json
from pathlib import Path
from typing import Any

from .common.report import table

FOLDER = Path(__file__).parent
# The order is: effects on training, then accuracy, then speed.
ORDER = "stability stability_large variance_clipping small_batches state_consistency accuracy"
ORDER += " determinism speed compiled compiled_tpu"

HEAD = """# Results of the experiments

Each experiment is one script. `python -m experiments.NAME` runs it and writes below `build/`;
`--help` explains it. `make experiments` writes the files of this folder. [results/](results/)
has all numbers, with the processor, device and versions that they were measured on.
"""
CLAIMS = """
A claim is a statement about this project that must hold on any machine: if one fails, `--quick`
fails. Goals, which are not always reached, are in the [last table](#aimed-at)."""
GOALS = """
## Aimed at

Goals that are not always reached, and why. [Design](../docs/design.md) has the details.
"""


def results() -> dict[str, Any]:
    """Returns the published results of each experiment, by name."""
    paths = {path.stem: path for path in sorted((FOLDER / "results").glob("*.json"))}
    names = dict.fromkeys((*ORDER.split(), *paths))
    texts = {name: paths[name].read_text(encoding="utf-8") for name in names if name in paths}
    return {name: json.loads(text) for name, text in texts.items()}


def figures(name: str) -> list[Path]:
    """Returns the figures of an experiment, without those of experiments with a longer name."""
    others = [other for other in results() if other.startswith(name) and other != name]
    found = sorted((FOLDER / "figures").glob(f"{name}*.png"))
    return [path for path in found if not path.stem.startswith(tuple(others))]


def overview() -> str:
    """Returns the table of all experiments."""
    lines = []
    for name, result in results().items():
        question, mark, thread = result["asked"].partition("?")
        holding = sum(holds for _, _, holds in result["verdicts"])
        claims = f"{holding} of {len(result['verdicts'])}"
        lines.append((f"[{question}{mark}](#{name}){thread}", result["answer"], claims))
    return table(("asked", "answer", "claims that hold"), lines)


def beside() -> str:
    """Returns the table of the layers' memory traffic, for all devices that have counts."""
    found = [result["beside"] for result in results().values() if "beside" in result]
    return table(found[0][0], [line for header, *lines in found for line in lines])


def document() -> str:
    """Returns the text of experiments/README.md."""
    parts, goals = [HEAD, overview(), CLAIMS], []
    for name, result in results().items():
        parts += [f"\n## {name}", f"\n{result['asked']} **Answer:** {result['answer']}."]
        parts += [f"\n![{path.stem}](figures/{path.name})" for path in figures(name)]
        if name == "compiled" and "beside" in result:
            parts += ["\nUnits of x, eqx-norm / Equinox (temporary memory):\n", beside()]
        parts += ["\n" + "\n".join(lines) for lines in result["shown"]]
        goals += [(name, *goal) for goal in result["goals"]]
    header = ("experiment", "aimed at", "measured", "what limits it")
    parts += [GOALS, table(header, goals)]
    return "\n".join(parts) + "\n"


def main() -> None:
    argparse.ArgumentParser("python -m experiments", description=__doc__).parse_args()
    (FOLDER / "README.md").write_text(document(), encoding="utf-8")


if __name__ == "__main__":
    main()
