"""Repeats the stability experiment of Equinox issue #659, on MNIST."""
