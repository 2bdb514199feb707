"""Makes primitives of JAX from passes over x, with their derivatives."""
