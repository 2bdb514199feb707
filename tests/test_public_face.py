"""What `import eqx_norm` offers, and how it presents itself."""

import importlib.metadata
import pydoc
import re

import pytest

import eqx_norm


def test_dir_is_what_there_is_to_use():
    assert dir(eqx_norm) == sorted([*eqx_norm.__all__, "__version__"])
    assert set(eqx_norm.__all__) == {"BatchNorm", "LayerNorm", "determinism", "strategies"}
    assert all(hasattr(eqx_norm, name) for name in dir(eqx_norm))


def test_the_version_is_that_of_the_installed_package():
    assert eqx_norm.__version__ == importlib.metadata.version("eqx-norm")


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
