"""Tests of layers over several devices."""
