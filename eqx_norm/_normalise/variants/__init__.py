"""Computes the formulas in the way that is fast on each platform."""
