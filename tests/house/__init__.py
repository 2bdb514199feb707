"""Tests of the house: its arrows, documents, packaging and face."""
