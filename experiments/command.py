"""What all experiments' command lines have in common: how much to run, and where to write."""

import argparse
import os
from collections.abc import Callable, Iterable, Sequence
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
    """Returns a parser with `--quick`, and `--out` or `--commit`, for `folder`."""
    made = plain_parser(name, description)
    made.add_argument("--quick", action="store_true", help=quick)
    where = made.add_mutually_exclusive_group()
    where.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help=f"writes {writes} (default: build/{name})",
    )
    where.add_argument(
        "--commit",
        action="store_true",
        help=f"replaces the committed results, in experiments; only of {whole}",
    )
    return made


def folder(
    parser: argparse.ArgumentParser, options: argparse.Namespace, *, whole: bool
) -> Path:
    """Returns the folder to write to: `--out`, else the committed one or one below `build`.

    The committed results differ by processor, and the README quotes them. So they are replaced
    where `--commit` asks for it, and only by the whole job. `results` in the folder is made
    now rather than after the work. Ends the program, in words, where either cannot be.
    """
    if options.commit and not whole:
        parser.exit(
            2,
            "--commit: the committed results are those of the whole job with every peer, and "
            "this is less. Leave out what selects a part of it, and run it where all that it "
            "compares with is installed (make experiments), or leave out --commit.\n",
        )
    out = options.out or (_committed() if options.commit else Path("build") / _name(parser))
    made = out / "results"
    try:
        made.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"{made} cannot be made ({error.strerror})"
        parser.exit(2, f"{why}: name another folder with --out\n")
    return out


def plain_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """Returns a parser with nothing but `--help`, for a module that is no experiment."""
    return argparse.ArgumentParser(
        prog=f"python -m experiments.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def redraw(
    name: str,
    description: str | None,
    draw: Callable[[Path], Iterable[Path]],
    arguments: Sequence[str] | None = None,
) -> int:
    """Runs a drawing module's command line: `draw(DIR)`, and prints which figures it made."""
    made = plain_parser(name, description)
    made.add_argument(
        "--out",
        type=Path,
        default=_committed(),
        metavar="DIR",
        help="reads DIR/results, writes DIR/figures (default: the committed ones, in "
        "experiments)",
    )
    options = made.parse_args(arguments)
    try:
        figures = list(draw(options.out))
    except FileNotFoundError as error:
        made.exit(2, f"--out {options.out}: there is no {error.filename} to draw\n")
    print(*(figures or [f"nothing to draw in {options.out / 'results'}"]), sep="\n")
    return 0


def _name(parser: argparse.ArgumentParser) -> str:
    return parser.prog.rpartition(".")[2]


def _committed() -> Path:
    return Path(os.path.relpath(results.FOLDER.parent))
