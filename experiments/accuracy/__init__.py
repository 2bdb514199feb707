"""Measures how accurate batch normalisation is, where that is hard."""
