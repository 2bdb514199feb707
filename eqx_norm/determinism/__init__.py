"""Makes runs agree to the bit, and finds the first value at which two runs differ.

`deterministic` applies the settings with which runs agree. `monitor` and `monitor_module` mark
values, forward and backward; `recorded` and `Ledger` write fingerprints of these values to a
file, step by step; `compare`, or `python -m eqx_norm.determinism compare A B`, names the first
step and value that differ. `fingerprint` identifies the bits of a whole pytree.

D. Riach presented such a tool ("Determinism in Deep Learning", GTC 2019, S9911), unreleased.
"""

from ._compare import Verdict as Verdict
from ._compare import compare as compare
from ._fingerprint import fingerprint as fingerprint
from ._ledger import Ledger as Ledger
from ._ledger import LedgerError as LedgerError
from ._ledger import read as read
from ._probe import monitor as monitor
from ._probe import monitor_module as monitor_module
from ._probe import recorded as recorded
from ._program import Record as Record
from ._recipe import Recipe as Recipe
from ._recipe import Setting as Setting
from ._recipe import deterministic as deterministic
