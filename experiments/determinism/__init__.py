"""Runs that agree to the last bit, and what it takes; and what probes cost."""
