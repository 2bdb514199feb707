"""Makes nested models, of Equinox's layers or of this package's, and calls them."""

import contextlib
from types import SimpleNamespace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jaxtyping
from hypothesis import strategies as st

import eqx_norm
from tests.compiling import filter_jit

C, KEY = 3, jax.random.key(0)
THEIRS: Any = eqx.nn
# Makes this package's layers of the arguments of Equinox's.
OF_EXAMPLES = ("LayerNorm", "GroupNorm", "RMSNorm")
OURS: Any = SimpleNamespace(**{n: getattr(eqx_norm, n) for n in ("BatchNorm", *OF_EXAMPLES)})
NORMS = tuple(getattr(eqx.nn, name) for name in ("BatchNorm", *OF_EXAMPLES))


class Counter(eqx.nn.StatefulLayer):
    """Is a user's stateful layer: adds the number of its calls."""

    index: eqx.nn.StateIndex

    def __init__(self):
        self.index = eqx.nn.StateIndex(jnp.zeros(()))

    def __call__(self, x, state, *, key=None):
        count = state.get(self.index)
        return x + count.astype(x.dtype), state.set(self.index, count + 1)


class Two(eqx.Module):
    first: Any
    second: Any


def tied(norm: Any) -> eqx.nn.Shared:
    """Returns one norm that is used twice."""
    return eqx.nn.Shared(Two(norm, norm), lambda two: two.second, lambda two: two.first)


booleans = st.booleans()
batch_norms = st.fixed_dictionaries(
    {
        "mode": st.sampled_from(["batch", "ema"]),
        "channelwise_affine": booleans,
        "momentum": st.sampled_from([0.5, 0.9, 0.99]),
        "inference": booleans,
    }
).map(lambda settings: ("BatchNorm", settings))
rows = st.fixed_dictionaries({"use_weight": booleans, "use_bias": booleans})
layer_norms = st.tuples(st.sampled_from(["LayerNorm", "RMSNorm"]), rows)
group_norms = st.fixed_dictionaries({"groups": st.sampled_from([1, C])})
others = st.sampled_from(["Linear", "Counter"]).map(lambda n: (n, {}))
of_examples = layer_norms | group_norms.map(lambda s: ("GroupNorm", {**s, "channels": C}))
some = st.one_of(batch_norms, batch_norms, of_examples, others)
descriptions = st.recursive(
    st.one_of(some, batch_norms.map(lambda norm: ("tied", norm))),
    lambda parts: st.lists(parts, min_size=1, max_size=3),
    max_leaves=5,
)


def build(description: Any, nn: Any, key: Any) -> Any:
    """Returns the model that is described, with the norms of `nn`."""
    if isinstance(description, list):
        keys = jax.random.split(key, len(description))
        return [build(part, nn, k) for part, k in zip(description, keys, strict=True)]
    kind, what = description
    match kind:
        case "BatchNorm":
            return _with_weights(nn.BatchNorm(C, "batch", **what), key)
        case "LayerNorm" | "RMSNorm":
            return _with_weights(getattr(nn, kind)(C, **what), key)
        case "GroupNorm":
            return _with_weights(nn.GroupNorm(**what), key)
        case "Linear":
            return eqx.nn.Linear(C, C, key=key)
        case "Counter":
            return Counter()
        case _:
            return tied(build(what, nn, key))


def _with_weights(norm: Any, key: Any) -> Any:
    """Returns the norm with a weight and a bias other than those of a new layer."""
    draw = 0.5 * jax.random.normal(key, (C,))
    new = [old if old is None else 1 + draw for old in (norm.weight, norm.bias)]
    where: Any = lambda n: (n.weight, n.bias)  # noqa: E731
    return eqx.tree_at(where, norm, new, is_leaf=lambda node: node is None)


def made(description: Any, nn: Any, members: int = 0) -> tuple[Any, Any]:
    """Returns model and state; with `members`, those of an ensemble."""

    def make(key):
        return eqx.nn.make_with_state(build)(description, nn, key)

    return eqx.filter_vmap(make)(jax.random.split(KEY, members)) if members else make(KEY)


def apply(model: Any, x: Any, state: Any) -> Any:
    """Returns the model's output for one example, with its parts called in order."""
    match model:
        case eqx.nn.Shared():
            return apply(model(), x, state)
        case list() | dict() | Two():
            parts = vars(model) if isinstance(model, Two) else model
            for part in parts.values() if isinstance(parts, dict) else parts:
                x, state = apply(part, x, state)
            return x, state
        case eqx.nn.StatefulLayer():
            return model(x, state)  # type: ignore
        case _:
            return model(x), state


@filter_jit
def call(model: Any, state: Any, x: Any) -> Any:
    """Returns the outputs of a batch, and the state after it; x has the members in front."""

    def of_one(model, state, x):
        mapped = jax.vmap(apply, (None, 0, None), (0, None), axis_name="batch")
        return mapped(model, x, state)

    return (eqx.filter_vmap(of_one) if x.ndim == 3 else of_one)(model, state, x)


def shapes(tree: Any) -> Any:
    """Returns the structure of a pytree, and the shapes and dtypes of its arrays."""

    def described(leaf: Any) -> Any:
        if eqx.is_array(leaf):
            return leaf.shape, leaf.dtype
        return leaf if isinstance(leaf, bool) else type(leaf)

    return jax.tree.structure(tree), list(map(described, jax.tree.leaves(tree)))


def inferred(norm: Any, state: Any) -> Any:
    """Returns the mean and the variance of inference, of an ensemble, too."""

    def infer(memory):
        used = norm.approach.infer(memory)
        return used.mean, used.variance

    memory = state.get(norm.memory_index).statistics
    return (jax.vmap(infer) if memory.mean.ndim > 1 else infer)(memory)


def descended(forward: Any, rate: float, model: Any, state: Any, x: Any) -> Any:
    """Returns model and state after a step of gradient descent, and the outputs before it."""

    def loss(model):
        y, after = forward(model, state, x)
        return -jax.nn.log_softmax(y)[:, 0].mean(), (after, y)

    by, (state, y) = eqx.filter_grad(loss, has_aux=True)(model)
    return eqx.apply_updates(model, jax.tree.map(lambda g: -rate * g, by)), state, y


@contextlib.contextmanager
def unchecked():
    """Lets annotations go unchecked, as they are for users."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
