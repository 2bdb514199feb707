"""Holds what the experiments share: steps of a run, rows, claims, figures, timing, data, peers.

Nothing here knows of any one experiment, and nothing happens when a module is imported.
"""
