"""Offers the one operation: `Values`, whose moments are taken and which are normalised.

A layer gives its `Values` once, takes their moments, has a strategy decide which moments to
use, and normalises by those. A row is normalised by its own moments at once. All this knows
arrays and axis names, and nothing of strategies.
"""

from . import derivatives as derivatives  # registers them
from .arithmetic import BatchImplementation as BatchImplementation
from .arithmetic import Implementation as Implementation
from .arithmetic import check as check
from .collectives import AxisName as AxisName
from .elementwise import as_tree as as_tree
from .reference import Activation as Activation
from .rows import normalise_row as normalise_row
from .values import Values as Values
