"""Wraps what a release of JAX may change: its registries of primitives, the contexts in which
programs are lowered, jaxprs, and collectives."""
