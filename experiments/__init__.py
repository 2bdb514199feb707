"""Experiments: each folder makes tables and figures, run as `python -m experiments.NAME`."""

import multiprocessing
import signal
import sys

# Ctrl-C ends a run and its workers at once, without a traceback. As an exception it crashes the
# process while NumPy or jaxlib is imported, and is lost in callbacks. A signal that is ignored
# stays so, as in the background; nothing changes where the package is only imported.
_run = sys.argv[:1] == ["-m"] or multiprocessing.parent_process() is not None
if _run and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
