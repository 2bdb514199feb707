"""Finds where two runs part: probes, ledgers, and their comparison.

Where two runs of one program do not give the same bits, the first value that differs says why.
`monitor` and `monitor_module` say what to look at, forward and backward; `recorded` and
`Ledger` write fingerprints of it down, step by step; `compare`, or `python -m
eqx_norm.determinism compare A B`, names the first step and probe that differ. `summarise` tells
of a whole tree in one line, and `deterministic` makes runs agree.

After D. Riach, "Determinism in Deep Learning" (GTC 2019, S9911), whose tool was not released.
"""

from ._compare import Verdict as Verdict
from ._compare import compare as compare
from ._fingerprint import Summary as Summary
from ._fingerprint import fingerprint as fingerprint
from ._fingerprint import summarise as summarise
from ._ledger import Ledger as Ledger
from ._ledger import LedgerError as LedgerError
from ._ledger import read as read
from ._probe import Record as Record
from ._probe import monitor as monitor
from ._probe import monitor_module as monitor_module
from ._probe import recorded as recorded
from ._recipe import Recipe as Recipe
from ._recipe import Setting as Setting
from ._recipe import deterministic as deterministic
