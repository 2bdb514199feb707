"""The tests of the operation."""
