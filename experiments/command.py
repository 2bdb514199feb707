"""What all experiments' command lines have in common: `--quick`, `--out`, where to write."""

import argparse
import os
from pathlib import Path

from . import results


def parser(
    name: str,
    description: str | None,
    *,
    quick: str,
    whole: str,
    writes: str = "DIR/results and DIR/figures",
) -> argparse.ArgumentParser:
    """With `--quick` and `--out`. Only `whole` may replace the committed results."""
    parser = argparse.ArgumentParser(
        prog=f"python -m experiments.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help=f"writes {writes} (default: experiments for "
        f"{whole}, build/{name} for anything else)",
    )
    return parser


def default_out(name: str, *, whole: bool) -> Path:
    """Only the whole job may replace the committed results."""
    return Path(os.path.relpath(results.FOLDER.parent)) if whole else Path("build") / name


def results_folder(parser: argparse.ArgumentParser, out: Path) -> Path:
    """`out/results`, made now rather than after the work; where it cannot be, the end."""
    folder = out / "results"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.exit(2, f"--out {out}: {folder} cannot be made ({error.strerror})\n")
    return folder
