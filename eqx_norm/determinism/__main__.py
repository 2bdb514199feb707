"""`python -m eqx_norm.determinism compare A B` tells where two runs part."""

import argparse
import sys
from typing import Any

from ._compare import compare
from ._ledger import LedgerError

TEACHING: Any = {
    "formatter_class": argparse.RawDescriptionHelpFormatter,
    "description": """\
Names the first step and probe at which two runs differ, by the ledgers of their probes:

    from eqx_norm.determinism import Ledger, monitor_module, recorded

    def loss(model, x, y):
        prediction = jax.vmap(monitor_module(model))(x)     # every layer, by its path
        return jnp.mean((prediction - y) ** 2)

    step = eqx.filter_jit(recorded(train_step))             # train_step takes the gradient
    with Ledger("a.jsonl") as ledger:
        for i in range(100):
            (model, optimiser_state), record = step(model, optimiser_state, *batch(i))
            ledger.append(i, record)

Run it twice, with two names, and compare. With recorded(train_step, keep_values=True) the
verdict also says how many elements differ, and by how much. What comes after the first
difference may only have inherited it. If it is the forward row of a layer, look into that
layer, and between it and the row before; if it is a cotangent, into the backward pass of what
comes after it in the network.
""",
    "epilog": "exit status: 0 the same; 1 they differ, or one is cut off, so that they may; 2 "
    "they\ncannot be compared, for the reason that is told",
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m eqx_norm.determinism", **TEACHING)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("compare", help="tells where two runs part", **TEACHING)
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
