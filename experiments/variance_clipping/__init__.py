"""Variance clipping, Ginsburg in Caffe #3963: what it prevents of what it should, on MNIST."""
