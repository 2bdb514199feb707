"""The ways to run a layer of JAX: op by op, compiled, rematerialised, scanned, differentiated.

A layer is two functions, `(parameters, memory, x) -> (y, memory)`, one to train and one to
evaluate. A way makes functions of the same arguments from them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

Apply = Callable[[Any, Any, jax.Array], tuple[jax.Array, Any]]
# ... and the gradients, none without a backward pass.
Step = Callable[[Any, Any, jax.Array], tuple[jax.Array, Any, Any]]


def _scan(apply: Apply) -> Apply:
    def scanned(parameters: Any, memory: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        def body(memory: Any, x: jax.Array) -> tuple[Any, jax.Array]:
            y, memory = apply(parameters, memory, x)
            return memory, y

        memory, y = lax.scan(body, memory, x[None])
        return y[0], memory

    return scanned


class Way(NamedTuple):
    compiled: bool
    inside: Callable[[Apply], Apply]

    def step(self, apply: Apply, backward: bool) -> Step:
        apply = self.inside(apply)

        def step(parameters: Any, memory: Any, x: jax.Array) -> tuple[jax.Array, Any, Any]:
            def loss(parameters: Any, x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, Any]]:
                y, after = apply(parameters, memory, x)
                return jnp.sum(jnp.sin(y)), (y, after)

            if backward:
                gradients, (y, after) = jax.grad(loss, (0, 1), has_aux=True)(parameters, x)
                return y, after, gradients
            _, (y, after) = loss(parameters, x)
            return y, after, ()

        return jax.jit(step) if self.compiled else step


OP_BY_OP, JIT = "op by op", "jit"
WAYS = {
    OP_BY_OP: Way(False, lambda apply: apply),
    JIT: Way(True, lambda apply: apply),
    "checkpoint, op by op": Way(False, jax.checkpoint),
    "checkpoint, jit": Way(True, jax.checkpoint),
    "scan, jit": Way(True, _scan),
}
