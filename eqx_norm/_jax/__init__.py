"""Wraps what a release of JAX may change: its registries of primitives, the contexts in which
programs are lowered, jaxprs, collectives, and what XLA does to the rounding of sums."""
