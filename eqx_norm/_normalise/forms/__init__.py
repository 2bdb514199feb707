"""Computes the formulas in the form that is fast on each platform."""
