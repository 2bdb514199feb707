"""Finds where two runs part: probes, ledgers, and their comparison.

Two runs of one program on one machine should give the same bits. Where they do not, the first
value that differs says why, and all that come after it do not: so this takes the fingerprint of
values inside the program, forward and backward, writes them to a file, step by step, and names
the first step and probe at which two files differ.

`monitor` and `monitor_module` say what to look at; `recorded` (or `recorded_into`) and `Ledger`
write it down; `compare`, or `python -m eqx_norm.determinism compare A B`, gives the verdict;
`summarise` tells of a whole tree in one line; `deterministic` makes runs agree.

After D. Riach, "Determinism in Deep Learning" (GTC 2019, S9911), whose tool was not released.
"""

from ._compare import Verdict as Verdict
from ._compare import compare as compare
from ._fingerprint import Summary as Summary
from ._fingerprint import fingerprint as fingerprint
from ._fingerprint import hexadecimal as hexadecimal
from ._fingerprint import summarise as summarise
from ._ledger import Ledger as Ledger
from ._ledger import LedgerError as LedgerError
from ._ledger import read as read
from ._probe import monitor as monitor
from ._probe import monitor_module as monitor_module
from ._recipe import Recipe as Recipe
from ._recipe import Setting as Setting
from ._recipe import deterministic as deterministic
from ._record import Record as Record
from ._trace import recorded as recorded
from ._trace import recorded_into as recorded_into
