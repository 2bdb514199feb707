"""Experiments: each file makes one figure or table; run as `python -m experiments.NAME`."""

from .lab import interrupt

# Before anything else is imported: it takes seconds.
interrupt.say_so()
