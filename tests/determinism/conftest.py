"""Records a tree of a float, a narrow float and a key, for the tests of ledgers."""

import jax
import pytest

from eqx_norm.determinism import recorded
from tests.determinism.harness import X, tree


@pytest.fixture(scope="session")
def bare():
    """Returns a record without values."""
    return jax.jit(recorded(tree))(X)[1]


@pytest.fixture(scope="session")
def records():
    """Returns two records with values, those of `X` and of `2 * X`."""
    step = jax.jit(recorded(tree, keep_values=True))
    return [step(x)[1] for x in (X, 2 * X)]
