"""Tests the experiments."""
