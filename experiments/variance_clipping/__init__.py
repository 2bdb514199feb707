"""Measures what variance clipping, as in Caffe #3963, prevents on MNIST."""
