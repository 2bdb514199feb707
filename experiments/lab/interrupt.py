"""Has Ctrl-C end an experiment with one line, not with a traceback."""

import contextlib
import os
import signal
import sys
from types import FrameType


def say_so() -> None:
    """Has Ctrl-C end `python -m experiments.NAME` with one line, its imports included.

    The program ends itself by the same signal, which a shell sees as exit code 130, so that
    make and scripts end as well. Nothing changes where the package is only imported, nor where
    the signal is ignored: so a shell starts what is to run in the background.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        return
    workers = sys.modules.get("multiprocessing.process")
    if workers is not None and workers.parent_process() is not None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # without a word: the parent says it
    elif sys.argv[:1] == ["-m"]:  # so it is called until Python has found NAME
        signal.signal(signal.SIGINT, _end)


def _end(number: int, frame: FrameType | None) -> None:
    """Ends the program here and now.

    A KeyboardInterrupt is not safe: raised while NumPy or jaxlib is imported it crashes the
    process, and raised in a callback of the garbage collector's it is lost.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    spec = sys.modules["__main__"].__spec__
    name = spec.name.removesuffix(".__main__") if spec else "experiments"
    # Not by print, which cannot be called while it is being called; below a bar of progress.
    below = "\n" if sys.stderr.isatty() else ""
    with contextlib.suppress(OSError):  # nobody reads it
        os.write(2, f"{below}python -m {name}: interrupted\n".encode())
    signal.raise_signal(signal.SIGINT)
