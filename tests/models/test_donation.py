"""Tests that results of all model functions can be donated: no array is in two leaves.

https://github.com/liesel-devs/liesel/issues/272
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from eqx_norm import models
from eqx_norm.strategies import Accumulated
from tests.helpers import normal
from tests.models.nested import OURS, THEIRS, C, made, network, norm


def trained():
    return made(network, OURS)


def accumulating():
    return models.reconfigure(*trained(), approach=lambda s: Accumulated(s, every=2))


def folded():
    model, state = made(lambda nn, key: [eqx.nn.Linear(C, C, key=key), norm(nn)], OURS)
    return models.fold_pairs(eqx.nn.inference_mode(model), state, {"[0]": "[1]"})


RESULTS = {
    "swap": lambda: models.swap(*made(network, THEIRS)),
    "unswap": lambda: models.unswap(*trained()),
    "reconfigure": lambda: models.reconfigure(*trained(), momentum=0.3, weight_offset=1.0),
    "accumulated": accumulating,
    "accumulated to ema": lambda: models.reconfigure(*accumulating(), approach="ema"),
    "freeze": lambda: models.freeze(trained()),
    "recalibrate": lambda: models.recalibrate(*made(norm, OURS), [normal(0, (8, C))]),
    "from_torch": lambda: models.from_torch(*trained(), models.to_torch(*trained()))[:2],
    "fold_pairs": folded,
}


@pytest.mark.parametrize("result", RESULTS.values(), ids=RESULTS)
def test_results_of_model_functions_can_be_donated(result):
    arrays = eqx.filter(result(), eqx.is_array)
    jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), donate_argnums=0)(arrays)
