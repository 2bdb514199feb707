"""Tests that an unsupported call is an error that names the layer and the fix."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm import BatchNorm, InstanceNorm, LayerNorm
from eqx_norm.models import (
    fold_pairs,
    freeze,
    from_torch,
    pool_statistics,
    propose_pairs,
    recalibrate,
    reconfigure,
    swap,
    to_torch,
    unfreeze,
    unswap,
)
from eqx_norm.strategies import (
    Accumulated,
    Average,
    Batch,
    Cumulative,
    Frozen,
    VarianceClip,
    named,
)
from tests.helpers import Cumulative as Unloaded
from tests.helpers import Loading, copy, load, make, normal, random_layer
from tests.models.nested import KEY, OURS, THEIRS, C, call, made, norm

UNOPTIMISED = True  # compares values: tests/compiling.py


def two(nn, key):
    return [norm(nn), {"row": nn.LayerNorm(C)}]


def conv(out=C, kind=eqx.nn.Conv1d):
    return random_layer(kind, C, out, 3)


class Standardised(eqx.nn.Conv1d):
    def __call__(self, x, *, key=None):
        return super().__call__(x - x.mean(), key=key)


class Wrong(Unloaded):
    def load(self, learnt):
        return learnt.mean


MODEL, STATE = made(two, OURS)
_, STATE = call(MODEL, STATE, normal(0, (4, C)))
SWAPPED = made(two, THEIRS)
WEIGHTS = eqx.filter(MODEL, eqx.is_inexact_array)
LINEAR = [random_layer(eqx.nn.Linear, C, C)], STATE
NORM, NORM_STATE = BOTH = make(C, "batch", approach="batch", inference=True)
UNLOADED = make(C, "batch", approach=Unloaded())
WRONG = make(C, "batch", approach=Wrong())
OWN: Any = type("Own", (BatchNorm,), {})(C, "batch", approach="batch")
LOADING = make(C, "batch", approach=Loading())
X = normal(0, (4, C))
PATH: Any = "[0]"
BYTES: Any = b"5"
TEXTS: Any = ["5"]
NEGATIVE: Any = [-1.0, 1.0, 1.0]
TEXT: Any = "text"
PAIRS: Any = [("[0]", "[1]")]
NUMBER: Any = {"[0]": 0}
FROM_NUMBER: Any = {0: "a"}
NO_STATE: Any = None
LOADED: dict[str, Any] = {"running_mean": np.ones(C), "running_var": np.ones(C)}


def tied(nn, key):
    """Returns two norms that share an entry of the state."""
    norm = nn.BatchNorm(C, "batch", mode="batch")
    norms = [norm, eqx.tree_at(lambda norm: norm.weight, norm, norm.weight + 1)]
    return eqx.nn.Shared(norms, *(lambda m, i=i: m[i].batch_state_index for i in (1, 0)))


TIED = made(tied, THEIRS)
# HUGE overflows when divided by a small standard deviation.
HUGE = jax.tree.map(lambda a: jnp.full_like(a, 6e4, jnp.float16), conv())
SMALL = load(NORM, copy(NORM_STATE), np.ones(C), np.full(C, 1e-4))


def mapped(state):
    """Returns the state after a call that was mapped without `out_axes=(0, None)`."""
    return jax.vmap(lambda x, state: state, (0, None))(X, state)


def blocks(nn, key):
    return [conv(), BatchNorm(C, "batch", approach="batch", inference=True)]


PLAIN = conv(), NORM
COMPLEX = make(C, "batch", approach="batch", inference=True, dtype=jnp.complex64)
BARE = eqx.tree_at(lambda n: (n.weight, n.bias), COMPLEX[0], (None, None)), COMPLEX[1]
BLOCKS = made(blocks, OURS, members=3)
SPECTRAL = eqx.nn.SpectralNorm(conv(), "weight", key=KEY)
NO_WEIGHT, ITS = made(lambda nn, key: nn.BatchNorm(C, "batch", 1e-5, False, mode="ema"), OURS)
jitted = eqx.filter_jit
EXCHANGED = r"^The model given is an eqx.nn.State.* \(model, state, "
STACKED = r"^\[0\]: The state given has one more axis in front: .*not stacked"
POSITIVE = "give the number of values per channel, a finite number above 0"
UNKNOWN = r"The weight of these moments .* values=n in from_torch, reconfigure or swap"
STACKED_WEIGHT = r" is stacked, as in an ensemble .*\(3, 3, 3, 3\)\..*blocks.0"
TRACED = "^This function reads the values of arrays, .* outside of jit"


def is_row(path, layer):
    return "row" in path


def folded(layers, first="[0]", second="[1]", state: Any = NORM_STATE):
    return fold_pairs(layers, state, {first: second})


def shared(layers):
    return eqx.nn.Shared(layers, lambda m: m[1].weight, lambda m: m[0].weight)


def recalibrated(batches, model: Any = NORM, state: Any = NORM_STATE, forward: Any = None):
    return recalibrate(model, state, batches, forward)


# A call, and the error.
ERRORS: list[tuple[Any, str]] = [
    # swap and unswap
    (lambda: swap(*LINEAR), "nothing to swap: .* no norm of eqx.nn"),
    (lambda: swap(*SWAPPED, eps=0.0), r"^\[0\]: eps=0.0: "),
    (lambda: swap(*SWAPPED, where=PATH), r"^where='\[0\]' is not callable"),
    (lambda: swap(SWAPPED[0], STATE), r"^\[0\]: .*'list\[0\]\.batch_counter'.* another model"),
    (
        lambda: swap(SWAPPED[0]),
        r"^The state is missing.* \[0\]\..*\(model, state, \.\.\.\): .*make",
    ),
    (lambda: recalibrate(MODEL, NO_STATE, [X]), "^The state is missing"),
    (lambda: swap(*SWAPPED[::-1]), EXCHANGED),
    (lambda: swap(SWAPPED[0], mapped(SWAPPED[1])), STACKED),
    (lambda: swap(*TIED), "eqx.nn.Shared shares an index of this layer"),
    (lambda: unswap(MODEL, STATE, mode="adam"), "^mode='adam': .*mode='batch'"),
    (lambda: unswap(MODEL, mapped(STATE)), STACKED),
    (lambda: unswap(*swap(*SWAPPED, "adam")), r"^\[0\]: approach=Adam\("),
    (lambda: unswap(*swap(*SWAPPED, activation=jnp.tanh)), r"\[0\]: activation=.*reconfigure"),
    (lambda: unswap(LayerNorm(3, axis_name="a")), "^LayerNorm: axis_name='a': .* where="),
    (lambda: unswap(WEIGHTS), r"^\[0\]: it has no flag inference.* make this memory anew"),
    (lambda: unswap([LayerNorm(C, axis=0)]), r"^\[0\]: axis=0: Equinox's layer has none"),
    # reconfigure
    (lambda: reconfigure(*LINEAR, eps=1.0), r"no layer of eqx_norm; .*swap\("),
    (lambda: reconfigure(MODEL, STATE, input_size=4), "^input_size= .*, only activation, app"),
    (lambda: reconfigure(MODEL, STATE, is_row, approach="ema"), "^approach= .*, only activ"),
    (lambda: reconfigure(MODEL, STATE, lambda *_: 0), r"where= chose none of \[0\], \[1\]\['r"),
    (lambda: reconfigure(MODEL, STATE, approach=Batch), r"^\[0\]: .* with the parentheses"),
    (lambda: reconfigure(MODEL, STATE, approach=Unloaded()), r"^\[0\]: Cumulative cannot take"),
    (lambda: reconfigure(*BOTH, approach=Unloaded(), momentum=0.5), "momentum=0.5: .*Cumul"),
    (lambda: reconfigure(NORM, UNLOADED[1], approach="ema"), "^BatchNorm: .*another layer"),
    (lambda: reconfigure(MODEL, STATE, approach=Wrong()), r"(?s)^\[0\]: Wrong\.load .*has m"),
    (lambda: reconfigure(MODEL, STATE, approach=Cumulative()), rf"^\[0\]: {UNKNOWN}"),
    (lambda: reconfigure(NORM, SMALL, approach=Average()), "weighs .*: batches=n in reconf"),
    (lambda: reconfigure(MODEL, STATE, values=9), r"^\[0\]: values=9, .* a new approach="),
    (lambda: reconfigure(MODEL, STATE, approach="ema", values=TEXT), f"'text': {POSITIVE}"),
    (lambda: reconfigure(MODEL, STATE, approach="ema", batches=0), "batches=0: .* of 1 or"),
    (lambda: reconfigure(MODEL, STATE, approach=lambda s: None), r"^\[0\]: approach= is None"),
    (lambda: reconfigure(STATE, MODEL, eps=1.0), EXCHANGED),
    (lambda: reconfigure(MODEL, mapped(STATE), eps=1.0), STACKED),
    (lambda: reconfigure(MODEL, NO_STATE, eps=1.0), "^The state is missing"),
    (
        lambda: reconfigure(WEIGHTS, weight_offset=1.0),
        r"^weight_offset=.*jax\.tree\.unf",
    ),
    (
        lambda: reconfigure(WEIGHTS, activation=eqx.nn.PReLU()),
        "activation= with arrays, .*anew",
    ),
    (lambda: reconfigure([MODEL, WEIGHTS], STATE, eps=1.0), "holds a model, .* each by itself"),
    (lambda: reconfigure(WEIGHTS, activation=TEXT), "^activation='text' is no function"),
    (lambda: reconfigure(WEIGHTS, momentum=2.0), r"^\[0\]: momentum=2\.0: "),
    # freeze and unfreeze
    (lambda: freeze(LINEAR[0]), "nothing to freeze: .*holds no eqx_norm.BatchNorm"),
    (lambda: unfreeze(MODEL), "nothing to unfreeze: .*holds no frozen BatchNorm"),
    # fold
    (lambda: folded(BLOCKS[0], state=BLOCKS[1]), f"^pairs=.*: Conv1d{STACKED_WEIGHT}"),
    (lambda: folded(PLAIN, state=mapped(NORM_STATE)), "one more axis in front: .* out_axes"),
    (lambda: folded(NORM_STATE, state=PLAIN), EXCHANGED),
    (lambda: fold_pairs(PLAIN, NORM_STATE, PAIRS), r"^pairs=\[\('\[0\]', .* dict\(pairs\)"),
    (lambda: fold_pairs(PLAIN, NORM_STATE, NUMBER), r"^pairs=\{'\[0\]': 0\} is no .*bn1"),
    (lambda: jax.jit(folded)(PLAIN), "^pairs=.*flag inference is traced .* eqx.filter_jit"),
    (lambda: fold_pairs(PLAIN, NORM_STATE, {}), "^pairs is empty.*bn1"),
    (lambda: folded([conv(), *COMPLEX[:1]], state=COMPLEX[1]), "complex64 .* layer of float32"),
    (lambda: folded([conv(), *BARE[:1]], state=BARE[1]), "the norm is complex, .* has float32"),
    (lambda: folded([conv(), NORM], "[2]"), r"^pairs=.*no linear .* '\[2\]'\..*: '\[0\]'"),
    (lambda: folded([conv(), norm(THEIRS)]), r"^pairs=.*equinox\S+BatchNorm.*models\.swap"),
    (lambda: folded([conv(), OWN]), r"^pairs=.*Own is a subclass.* field, self\.norm"),
    (lambda: folded([conv(kind=Standardised), NORM]), "^pairs=.*Standardised has another"),
    (lambda: folded([conv(4), NORM]), "the norm has 3 channels, but the layer returns 4"),
    (lambda: folded([conv(), eqx.nn.inference_mode(NORM, False)]), "^pairs.* in training mode"),
    (lambda: folded([jax.tree.map(jnp.int8, conv()), NORM]), "arrays of int8"),
    (lambda: folded([shared([conv(), conv()]), NORM], "[0].pytree[0]"), r"\[0\] is .*\.Shared"),
    (lambda: folded(shared([conv(), conv(), NORM]), "pytree[0]", "pytree[2]"), r"nn\.Shared"),
    (lambda: folded([eqx.nn.WeightNorm(conv()), NORM], "[0].layer"), r"nn\.WeightNorm"),
    (lambda: folded([SPECTRAL, NORM], "[0].layer"), r"nn\.SpectralNorm"),
    (lambda: folded([HUGE, NORM], state=SMALL), "not finite in float16; use float32"),
    # recalibrate
    (lambda: recalibrated([]), "^batches is empty"),
    (lambda: recalibrated([], *UNLOADED), "^BatchNorm: Cumulative cannot take over"),
    (lambda: recalibrated([["a"]]), "yields a list, not arrays"),
    (lambda: recalibrated([X], MODEL, STATE), "The model is a list, not callable"),
    (lambda: recalibrated([{"x": 1}]), "a dict, not arrays. Pass forward=lambda model, state"),
    (lambda: recalibrated([X], forward=lambda m, s, x: x), "returned .*, but must return"),
    (lambda: recalibrated([X], forward=lambda *_: STATE), "of another model: .* is given"),
    (lambda: recalibrated([X], LINEAR[0]), "nothing to recalibrate: .*that is not frozen"),
    (lambda: recalibrated([X], MODEL), r"^\[0\]: .*to another model"),
    (lambda: recalibrated([X * np.nan]), "No batch norm got .* 1 batches: the model"),
    (lambda: recalibrated([X], *BOTH[::-1]), EXCHANGED),
    (lambda: recalibrated([X], NORM, mapped(NORM_STATE)), "^BatchNorm: .* out_axes"),
    (lambda: recalibrated([X], NO_WEIGHT, mapped(ITS)), "(?s)failed on .* more axis.*forward"),
    (lambda: jitted(recalibrate)(NORM, NORM_STATE, [X]), TRACED),
    # from_torch and to_torch
    (lambda: from_torch(STATE, MODEL, {}), EXCHANGED),
    (lambda: to_torch(STATE, MODEL), EXCHANGED),
    (lambda: from_torch(MODEL, mapped(STATE), {}), STACKED),
    (lambda: to_torch(MODEL, mapped(STATE)), STACKED),
    (lambda: jitted(from_torch)(NORM, NORM_STATE, {}), TRACED),
    (lambda: jitted(lambda: from_torch(NORM, NORM_STATE, LOADED))(), TRACED),
    (lambda: jitted(lambda a: from_torch(NORM, NORM_STATE, {"weight": a}))(X), TRACED),
    (lambda: jitted(to_torch)(MODEL, STATE), TRACED),
    (lambda: from_torch(MODEL, STATE, {}, NUMBER), r"^names=\{'\[0\]': 0\} is no .* strings"),
    (lambda: to_torch(MODEL, STATE, FROM_NUMBER), r"^names=\{0: 'a'\} is no .* strings"),
    (lambda: to_torch(MODEL, STATE, TEXT), r"^names='text' is no mapping .*report\.matched"),
    (lambda: to_torch(MODEL, STATE, NUMBER.get), r"^names=\{'\[0\]': 0\} is no .* function"),
    (lambda: from_torch(*SWAPPED, {}), r"^\[0\]: .*eqx_norm\.models\.swap"),
    (lambda: from_torch(MODEL, None, {}), r"^\[0\]: .*in the model's state"),
    (lambda: from_torch(*UNLOADED, LOADED, strict=False), "^BatchNorm: Cumulative cannot take"),
    (lambda: from_torch(*WRONG, LOADED, strict=False), "^BatchNorm: Wrong.load returned"),
    (lambda: from_torch(*LOADING, LOADED, strict=False), f"^BatchNorm: {UNKNOWN}"),
    (lambda: from_torch(*LOADING, LOADED, strict=False, values=-5), f"values=-5: {POSITIVE}"),
    (lambda: from_torch(*LOADING, LOADED, strict=False, values=TEXT), f"'text': {POSITIVE}"),
    (lambda: from_torch(*LOADING, LOADED, strict=False, values=BYTES), rf"b'5': {POSITIVE}\.$"),
    (lambda: from_torch(*LOADING, LOADED, strict=False, values=1e39), rf"1e\+39: {POSITIVE}"),
    (lambda: reconfigure(MODEL, STATE, approach="ema", values=TEXTS), rf"\['5'\]: {POSITIVE}"),
    (
        lambda: from_torch(NORM, NORM_STATE, LOADED, strict=False, values=NEGATIVE),
        rf"^BatchNorm: values=\[-1.0, 1.0, 1.0\]: {POSITIVE}",
    ),
    (
        lambda: from_torch(
            NORM, NORM_STATE, {"weight": np.ones(C, np.complex64)}, strict=False
        ),
        "weight is complex64, whose imaginary part float32 cannot hold",
    ),
    (lambda: from_torch(InstanceNorm(C), None, LOADED), r"InstanceNorm's .*docs/own_norm\.md"),
    (lambda: from_torch(*BLOCKS, {}), STACKED_WEIGHT),
    (lambda: to_torch(*BLOCKS), STACKED_WEIGHT),
    (lambda: from_torch(NORM, NORM_STATE, PATH), r"a str\. .* module\.state_dict\(\) returns"),
    (lambda: from_torch(MODEL, STATE, {}, {"[9]": "a"}), r"has \['\[9\]'\], but no layer"),
    (lambda: to_torch(LINEAR[0] * 2, names=lambda _: "a"), r"^'\[1\]\.weight' and another ar"),
]


@pytest.mark.parametrize(("call", "error"), ERRORS, ids=[error for _, error in ERRORS])
def test_unsupported_calls_of_model_functions_are_errors(unchecked, call, error):
    with pytest.raises(ValueError, match=error):
        call()


# Arguments of the wrong kind.
MISTAKEN: dict[str, Any] = {
    "array": X,
    "array of batches": np.stack([X, X]),
    "state": STATE,
    "model": MODEL,
    "pairs": [("[0]", "[1]")],
    "path": "[0]",
    "nothing": None,
    "number": 3,
    "exhausted": iter(()),
    "empty list": [],
    "empty dict": {},
}
NO_LAYERS = "^The model given is (an|nothing|'|3|<).* has no layers. Pass a layer, or"
NO_MODEL = f"{NO_LAYERS}|{EXCHANGED}"
EMPTY = f"{NO_MODEL}|^There is nothing to |^pairs=.*: there is no linear layer"
NO_ENTRIES = r"^state=(?s:.*) is no eqx\.nn\.State|^The state is missing|pass state, too\.$"
NO_FUNCTION = "^where=(?s:.*) is not callable. Pass a function of a layer's path"
NO_MAPPING = "is no mapping of "
NO_STRATEGY = "(?s)^strategy=.* wraps a strategy object that learns"
NO_APPROACH = r"^(\[0\]: )?approach=(?s:.*) (is not known|is neither a name|is None)"
NO_BATCHES = (
    r"^batches is an array of shape \((2, )?4, 3\); give an iterable .* \[x\], or list\(x\)|"
    r"^batches=(?s:.*) is no iterable of batches. Write recalibrate\(model, state, batches\)|"
    "^batches is empty|^batches yields a (BatchNorm|tuple), not arrays. Pass forward="
)
NO_STATES = r"(?s)^states(=.* holds no states|\[0\] is .*, no eqx.nn.State): give a list"
NO_VALUES = (
    r"(?s)^values(=.*, but the number of states is 1|\[0\] is .* must be a number above 0)"
)
PAIR = {"[0]": "[1]"}
# A call with one argument of a wrong kind, the kinds that are right, and the error.
KINDS: list[tuple[Any, str, str]] = [
    (swap, "model", EMPTY),
    (lambda v: swap(v, STATE), "model", EMPTY),
    (lambda v: unswap(v, STATE), "model", EMPTY),
    (lambda v: reconfigure(v, STATE, eps=0.1), "model", EMPTY),
    (lambda v: recalibrate(v, STATE, [X]), "model", EMPTY),
    (lambda v: fold_pairs(v, NORM_STATE, PAIR), "", EMPTY),
    (freeze, "model", EMPTY),
    (unfreeze, "", EMPTY),
    (propose_pairs, "model, pairs, empty list, empty dict", NO_MODEL),
    (to_torch, "pairs, empty list, empty dict", f"{NO_MODEL}|pass state, too"),
    (
        lambda v: from_torch(v, STATE, {}),
        "pairs, empty list, empty dict",
        f"{NO_MODEL}|^Nothing",
    ),
    (lambda v: swap(SWAPPED[0], v), "state", NO_ENTRIES),
    (lambda v: unswap(MODEL, v), "state", NO_ENTRIES),
    (lambda v: reconfigure(MODEL, v, eps=0.1), "state", NO_ENTRIES),
    (lambda v: recalibrate(MODEL, v, [X]), "state", NO_ENTRIES),
    (lambda v: fold_pairs(PLAIN, v, PAIR), "state", NO_ENTRIES),
    (lambda v: from_torch(MODEL, v, {}), "state", NO_ENTRIES),
    (lambda v: to_torch(MODEL, v), "state", NO_ENTRIES),
    (lambda v: swap(*SWAPPED, where=v), "nothing", NO_FUNCTION),
    (lambda v: unswap(MODEL, STATE, where=v), "nothing", NO_FUNCTION),
    (lambda v: reconfigure(MODEL, STATE, v, eps=0.1), "nothing", NO_FUNCTION),
    (lambda v: freeze(MODEL, v), "nothing", NO_FUNCTION),
    (lambda v: unfreeze(MODEL, v), "nothing", NO_FUNCTION),
    (lambda v: pool_statistics(v, [STATE], [1]), "model", EMPTY),
    (lambda v: pool_statistics(MODEL, v, [1]), "", NO_STATES),
    (lambda v: pool_statistics(MODEL, [STATE], v), "", NO_VALUES),
    (recalibrated, "", NO_BATCHES),
    (
        lambda v: recalibrated([X], forward=v),
        "nothing",
        "^forward=.*not callable. .*forward=la",
    ),
    (lambda v: fold_pairs(PLAIN, NORM_STATE, v), "", f"{NO_MAPPING}|^pairs is empty"),
    (lambda v: from_torch(MODEL, STATE, {}, v), "nothing, empty dict", NO_MAPPING),
    (lambda v: to_torch(MODEL, STATE, v), "nothing, empty dict", NO_MAPPING),
    (
        lambda v: from_torch(MODEL, STATE, v),
        "",
        "^state_dict is a .* mapping|^Nothing was load",
    ),
    (lambda v: reconfigure(MODEL, STATE, approach=v), "", NO_APPROACH),
    (lambda v: swap(*SWAPPED, v), "nothing", NO_APPROACH),
    (lambda v: named(v, 0.9), "", NO_APPROACH),
    (lambda v: Accumulated(v, 2), "", NO_STRATEGY),
    (VarianceClip, "", NO_STRATEGY),
    (Frozen, "", NO_STRATEGY),
]


# JAX warns of an iterator in a pytree, which becomes an error of JAX later.
@pytest.mark.filterwarnings("ignore:Python iterable type:DeprecationWarning")
@pytest.mark.parametrize(("call", "right", "error"), KINDS)
def test_arguments_of_the_wrong_kind_are_errors(unchecked, call, right, error):
    for name, value in MISTAKEN.items():
        if name not in right.split(", "):
            with pytest.raises(ValueError, match=error):
                call(value)
