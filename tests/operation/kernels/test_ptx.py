"""Tests how `ptx`, which make gpu-compile-check runs, reads the machine code of kernels."""

from . import ptx

# One of the two products is added to the value of another lane without rounding.
CODE = """\
	shfl.sync.bfly.b32	%r13, %r12, 8, 31, -1;
	add.rn.f32 	%r14, %r12, %r13;
	fma.rn.f32 	%r15, %r1, %r2, %r13;
	fma.rn.f32 	%r16, %r1, %r2, %r14;
"""


def test_products_contracted_into_a_sum_over_lanes():
    assert ptx.contracted(CODE) == 1
