"""`python -m eqx_norm.determinism compare A B` tells where two runs part."""

import argparse
import contextlib
import os
import sys
from typing import Any

from ._compare import compare
from ._ledger import LedgerError, printable

DESCRIPTION = """\
Compares two runs by the ledgers of their probes, and names the first step and probe at which
they differ.

A ledger is written like this:

    from eqx_norm.determinism import Ledger, monitor, monitor_module, recorded

    def loss(model, x, y):
        prediction = jax.vmap(monitor_module(model))(x)     # every layer, by its path
        return monitor(jnp.mean((prediction - y) ** 2), "loss")

    step = eqx.filter_jit(recorded(train_step))             # train_step takes the gradient
    with Ledger("a.jsonl") as ledger:
        for i in range(100):
            (model, optimiser_state), record = step(model, optimiser_state, *batch(i))
            ledger.append(i, record)

Run it twice, with two names, and compare. With recorded(train_step, keep_values=True) the
verdict also says how many elements differ, and by how much. The first difference is where to
look: what comes after it may only have inherited it. If it is the forward row of a layer, look
into that layer, and between it and the row before; if it is a cotangent, into the backward pass
of what comes after it in the network.
"""

STATUS = (
    "exit status: 0 the same; 1 they differ, or one is cut off, so that they may; 2 they\n"
    "cannot be compared, or the verdict cannot be written, for the reason that is told"
)


def main(arguments: list[str] | None = None) -> int:
    teaching: Any = {
        "description": DESCRIPTION,
        "epilog": STATUS,
        "formatter_class": argparse.RawDescriptionHelpFormatter,
    }
    parser = argparse.ArgumentParser(prog="python -m eqx_norm.determinism", **teaching)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    what = "names the first step and probe at which two runs differ"
    command = commands.add_parser("compare", help=what, **teaching)
    command.add_argument("a", metavar="A", help="the ledger of one run")
    command.add_argument("b", metavar="B", help="the ledger of the other")
    try:
        try:
            given = parser.parse_args(arguments)
        except SystemExit:
            _write("", sys.stdout)  # the help, while there is somebody to tell of a failure
            raise
        verdict = compare(given.a, given.b)
        _write(f"{verdict}\n", sys.stdout)
        return 0 if verdict.same else 1
    except LedgerError as error:
        why = str(error)
    except OSError as error:
        why = f"The output cannot be written ({error.strerror or error})."
    except MemoryError:
        why = "There is not enough memory for these ledgers."
    except KeyboardInterrupt:
        why = "Interrupted."
    with contextlib.suppress(OSError):  # there is nobody to tell
        _write(f"{printable(why)}\n", sys.stderr)
    return 2


def _write(text: str, stream: Any) -> None:
    """Writes the whole text, with escapes for the letters that the stream does not have."""
    if stream is None:  # `>&-`
        return
    encoding = stream.encoding or "utf-8"
    try:
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except OSError as error:
        # Python would try to write what is left when it ends, and complain.
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())
        if not isinstance(error, BrokenPipeError):  # who reads has seen enough: `| head`
            raise


if __name__ == "__main__":
    sys.exit(main())
