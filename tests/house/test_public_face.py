"""What `import eqx_norm` offers, and how it presents itself."""

import importlib.metadata
import inspect
import pydoc
import re

import equinox as eqx
import jax
import pytest

import eqx_norm
from eqx_norm import BatchNorm

from .helpers import make, normal


def test_dir_is_what_there_is_to_use():
    assert dir(eqx_norm) == sorted([*eqx_norm.__all__, "__version__"])
    assert set(eqx_norm.__all__) == {"BatchNorm", "LayerNorm", "determinism", "strategies"}
    assert all(hasattr(eqx_norm, name) for name in dir(eqx_norm))


def test_the_version_is_that_of_the_installed_package():
    assert eqx_norm.__version__ == importlib.metadata.version("eqx-norm")


def test_the_example_in_the_docstring_trains_then_infers():
    (example,) = re.findall(r"```python\n(.*?)```", inspect.getdoc(BatchNorm) or "", re.DOTALL)
    names = {"BatchNorm": BatchNorm, "eqx": eqx, "jax": jax, "x": normal(0, (2, 3, 2, 2), 5)}
    exec(example, names)
    new, trained, inferred = (
        state.get(names["model"].memory_index)
        for state in (make(3, "batch", approach="batch")[1], names["state"], names["_"])
    )
    assert not eqx.tree_equal(new, trained)
    assert eqx.tree_equal(trained, inferred)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'eqx_norm' has no attribute 'GroupNorm'"):
        eqx_norm.GroupNorm  # type: ignore  # noqa: B018


def test_help_shows_the_layers():
    text = pydoc.plain(pydoc.render_doc(eqx_norm))
    for name, field in (("BatchNorm", "approach"), ("LayerNorm", "shape")):
        described = re.search(rf"class {name}\(equinox.*?(?=\n    class |\Z)", text, re.DOTALL)
        assert described
        assert f"- `{field}`: " in described[0]
    assert eqx_norm.__version__ in text
