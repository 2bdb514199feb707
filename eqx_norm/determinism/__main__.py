"""Defines the command `python -m eqx_norm.determinism compare A B`."""

import argparse
import sys
from typing import Any

from ._compare import compare
from ._ledger import LedgerError

TEACHING: Any = {
    "formatter_class": argparse.RawDescriptionHelpFormatter,
    "description": """\
Names the first step and value at which two runs of one program differ.

1. Record each run. A probe (monitor_module, or monitor for a single value) marks values, and a
   ledger stores their fingerprints:

    from eqx_norm.determinism import Ledger, monitor_module, recorded

    def loss(model, x, y):
        prediction = jax.vmap(monitor_module(model))(x)     # every layer, by its path
        return jnp.mean((prediction - y) ** 2)

    step = eqx.filter_jit(recorded(train_step))             # train_step takes the gradient
    with Ledger("a.jsonl") as ledger:                       # "b.jsonl" in the second run
        for i in range(100):
            (model, optimiser_state), record = step(model, optimiser_state, *batch(i))
            ledger.append(i, record)

2. Compare the two files:

    python -m eqx_norm.determinism compare a.jsonl b.jsonl

3. Look for the cause: if the first difference is the forward row of a layer, in that layer or
   between it and the row before; if it is a cotangent, in the backward pass of later layers.
   With recorded(..., keep_values=True), compare also prints how many elements differ, and by
   how much. Later differences may follow from the first.
""",
    "epilog": "exit status: 0 the same; 1 different, or a file is incomplete; 2 they cannot be "
    "compared\n(the reason is printed)",
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m eqx_norm.determinism", **TEACHING)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    about = "names the first difference of two runs"
    command = commands.add_parser("compare", help=about, **TEACHING)
    command.add_argument("a", metavar="A", help="the ledger of one run")
    command.add_argument("b", metavar="B", help="the ledger of the other")
    given = parser.parse_args(arguments)
    try:
        verdict = compare(given.a, given.b)
    except LedgerError as error:
        print(error, file=sys.stderr)
        return 2
    print(verdict)
    return 0 if verdict.same else 1


if __name__ == "__main__":
    sys.exit(main())
