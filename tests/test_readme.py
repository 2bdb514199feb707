"""Every code block of the README runs, every number in it is the measured one."""

import re
import shutil
from pathlib import Path

import pytest

from experiments import (
    accuracy,
    accuracy_approaches,
    accuracy_measured,
    benchmark,
    benchmark_runs,
    determinism,
    determinism_runs,
    gpu_compile,
    gpu_kernels_tables,
    layer_norm,
    layer_norm_measured,
    results,
    stability,
    stability_runs,
    state_consistency,
    state_consistency_rows,
    variance_clipping_runs,
    variance_clipping_tables,
)

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"{len(block)} characters")
def test_code_runs(block):
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})


def test_the_strategy_is_shorter_than_20_lines():
    strategy = next(block for block in BLOCKS if "class Cumulative" in block)
    assert len([line for line in strategy.splitlines() if line.strip()]) < 20


def test_commands_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    commands = re.findall(r"^make ([a-z-]+)", README, re.MULTILINE)
    assert {"stability", "test"} <= set(commands)
    for command in commands:
        assert re.search(rf"^{command}:", makefile, re.MULTILINE), command


def test_links_lead_somewhere():
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


TABLES = {
    "stability": lambda path: stability.report(stability_runs.load(path))[0],
    "stability_large": lambda path: stability.report(stability_runs.load(path))[0],
    "accuracy": lambda path: accuracy.report(accuracy_measured.load(path))[0],
    "accuracy_approaches": lambda path: accuracy_approaches.report(
        accuracy_approaches.load(path)
    )[0],
    "layer_norm": lambda path: layer_norm.report(layer_norm_measured.load(path.parent)),
    "state_consistency": lambda path: state_consistency.report(
        state_consistency_rows.load(path)
    )[0],
    "variance_clipping": lambda path: variance_clipping_tables.summary(
        variance_clipping_runs.load(path)
    ),
    "determinism": lambda path: determinism.summary(determinism_runs.load(path)),
    "benchmark": lambda path: benchmark.summary(benchmark_runs.load(path)),
    "benchmark_kept-memory": lambda path: benchmark.verdicts(benchmark_runs.load(path)),
    "gpu_compile": gpu_compile.summary,
    "gpu_kernels": gpu_kernels_tables.summary,
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Returns a folder with the committed results, without what was noted of the machine."""
    folder = tmp_path_factory.mktemp("results")
    for path in results.FOLDER.glob("*.csv"):
        shutil.copy(path, folder)
    return folder


@pytest.mark.parametrize("stem", TABLES)
def test_tables_are_the_measured_ones(stem, measured):
    """To renew them: python -m tests.test_readme."""
    assert _between(stem).strip() == TABLES[stem](measured / f"{stem}.csv")


def _between(stem: str) -> str:
    return README.split(f"<!-- {stem}:begin -->")[1].split(f"<!-- {stem}:end -->")[0]


def test_percentages_in_the_text_are_those_of_the_tables():
    rows = [line for line in README.splitlines() if line.startswith("|")]
    measured = set(re.findall(r"\d+\.\d%", "\n".join(rows)))
    assert set(re.findall(r"\d+\.\d%", README)) <= measured


if __name__ == "__main__":
    for stem, table in TABLES.items():
        begin = f"<!-- {stem}:begin -->"
        README = README.replace(
            begin + _between(stem), f"{begin}\n{table(results.FOLDER / f'{stem}.csv')}\n"
        )
    (ROOT / "README.md").write_text(README, encoding="utf-8")
