"""Measures layer normalisation: OneFlow's issue with this layer and its peers."""
