"""Takes derivatives of all orders of functions.

Each transformation takes a function, its operands, and a tangent of each operand.
"""

import jax
import jax.numpy as jnp


def loss_of(f):
    """Returns a loss, a sum over all outputs of `f` with a different cotangent of each."""

    def loss(*primals):
        return sum(jnp.sum(jnp.sin(y + 1)) for y in jax.tree.leaves(f(*primals)))

    return loss


def gradient(f, primals, tangents):
    return jax.grad(loss_of(f), tuple(range(len(primals))))(*primals)


def linearized(f, primals, tangents):
    y, linear = jax.linearize(f, *primals)
    return y, linear(*tangents), jax.linear_transpose(linear, *primals)(y)


def scanned(f, primals, tangents):
    """Returns the gradient through layers that share their weights, and are recomputed."""

    def layers(*primals):
        def layer(x, scale):
            return x + jax.checkpoint(jax.jit(f))(*primals[:-1], scale * x), None

        return jax.lax.scan(layer, primals[-1], jnp.array([1.0, 0.5, 2.0]))[0]

    return gradient(layers, primals, tangents)


def slope_of_gradient(f, primals, tangents):
    return jax.jvp(lambda *p: gradient(f, p, tangents), primals, tangents)[1]


def gradient_of_gradient(f, primals, tangents):
    return gradient(lambda *p: gradient(f, p, tangents), primals, tangents)


def third_order(f, primals, tangents):
    def along(t):
        return loss_of(f)(*(p + t * d for p, d in zip(primals, tangents, strict=True)))

    return jax.jacfwd(jax.jacfwd(jax.jacfwd(along)))(jnp.zeros(()))


def ensemble_of_gradients(f, primals, tangents):
    stacked = [jnp.stack([p, p + d, p - d]) for p, d in zip(primals, tangents, strict=True)]
    return jax.vmap(lambda *p: gradient(f, p, tangents))(*stacked)


def gradient_of_ensemble(f, primals, tangents):
    """Returns gradients of members that share all operands but x: those gradients are sums."""
    *vectors, x = primals
    together = jax.vmap(f, in_axes=(*(None for _ in vectors), 0))
    members = jnp.stack([x, x + tangents[-1], 2 * x])
    return gradient(together, (*vectors, members), tangents)


def gradient_of_members_with_one_x(f, primals, tangents):
    """Returns gradients of members that share x alone, as an ensemble on one batch does."""
    *vectors, x = primals
    pairs = zip(vectors, tangents, strict=False)  # the last tangent is that of x
    members = [jnp.stack([v, v + d, v - d]) for v, d in pairs]
    together = jax.vmap(f, in_axes=(*(0 for _ in vectors), None))
    return gradient(together, (*members, x), tangents)


def in_one_operand(f, primals, tangents):
    """Returns derivatives in one operand at a time; the other operands are constants."""

    def derivatives(i):
        def moved(operand):
            return f(*primals[:i], operand, *primals[i + 1 :])

        one = slice(i, i + 1)
        return [t(moved, primals[one], tangents[one]) for t in BASIC]

    return [derivatives(i) for i in range(len(primals))]


def mapped(f, primals, others):
    """Returns `f`, mapped over each operand alone, over all but one, over all, and twice."""
    count = len(primals)
    alone = [tuple(0 if i == j else None for j in range(count)) for i in range(count)]
    others_than = [tuple(None if i == 0 else 0 for i in places) for places in alone]
    stacked = [jnp.stack(pair) for pair in zip(primals, others, strict=True)]

    def over(places):
        pairs = zip(places, primals, stacked, strict=True)
        return jax.vmap(f, places)(*(p if i is None else s for i, p, s in pairs))

    reversed_too = [jnp.stack([s, s[::-1]], -1) for s in stacked]
    twice = jax.vmap(jax.vmap(f), in_axes=-1)(*reversed_too)
    all_places = dict.fromkeys([*alone, *others_than, (0,) * count])
    return [over(places) for places in all_places if 0 in places], twice


BASIC = linearized, slope_of_gradient
HIGHER = gradient_of_gradient, third_order
REPEATED = (
    scanned,
    ensemble_of_gradients,
    gradient_of_ensemble,
    gradient_of_members_with_one_x,
)
