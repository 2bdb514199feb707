"""Names the first step and value at which two runs of one program differ.

Each run has written a ledger, as the docstring of eqx_norm.determinism.recorded shows.

exit status: 0 the same; 1 different, or a file is incomplete; 2 no comparison is possible
"""

import argparse
import sys

from ._compare import compare
from ._ledger import LedgerError


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m eqx_norm.determinism",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=["compare"])
    parser.add_argument("a", metavar="A", help="the ledger of one run")
    parser.add_argument("b", metavar="B", help="the ledger of the other")
    options = parser.parse_args(arguments)
    try:
        verdict = compare(options.a, options.b)
    except LedgerError as error:
        print(error, file=sys.stderr)
        return 2
    print(verdict)
    return 0 if verdict.same else 1


if __name__ == "__main__":
    sys.exit(main())
