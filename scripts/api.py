"""Prepares eqx_norm for the API's pages: an extension of griffe, named in mkdocs.yml."""

from collections.abc import Iterator
from typing import Any

import griffe

POSITIONAL = griffe.ParameterKind.positional_or_keyword
KEYWORD = griffe.ParameterKind.keyword_only


class PublicClasses(griffe.Extension):
    """Names the bases of a class in full, and shows the constructor that Equinox makes."""

    def on_package_loaded(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Changes the classes that griffe has read from the package."""
        for cls in list(classes(pkg)):
            parameters = [] if "__init__" in cls.all_members else list(fields(cls))
            init = cls.inherited_members.get("__init__")
            if init is not None and init.lineno:  # written in a base class, without a page
                parameters = [*init.parameters][1:]
            if parameters and not cls.name.startswith("Abstract"):
                cls.set_member("__init__", constructor(parameters))
        for cls in classes(pkg):
            names = [public(base.canonical_path, pkg) for base in cls.bases]
            cls.bases = [griffe.ExprName(name) for name in names if name]
        # The value of NAMED has a lambda; the page lists the names.
        pkg["strategies._named.NAMED"].value = None


def classes(module: griffe.Module) -> Iterator[griffe.Class]:
    """Yields all classes of the package."""
    for member in module.members.values():
        if not member.is_alias and member.is_class:
            yield member
        elif not member.is_alias and member.is_module:
            yield from classes(member)


def fields(cls: griffe.Class) -> Iterator[griffe.Parameter]:
    """Yields the fields of a module as parameters, those of its bases first."""
    members = {}
    for base in (*reversed(cls.mro()), cls):
        members |= base.members
    for name, member in members.items():
        if member.is_attribute and "instance-attribute" in member.labels:
            options = {"default": member.value}
            if getattr(member.value, "canonical_path", "") == "equinox.field":
                options = {option.name: option.value for option in member.value.arguments}
            yield griffe.Parameter(
                name,
                annotation=member.annotation,
                kind=KEYWORD if "kw_only" in options else POSITIONAL,
                default=options.get("default"),
            )


def constructor(parameters: list[griffe.Parameter]) -> griffe.Function:
    """Returns `__init__` with these parameters after `self`."""
    parameters = [griffe.Parameter("self", kind=POSITIONAL), *parameters]
    return griffe.Function("__init__", parameters=griffe.Parameters(*parameters))


def public(path: str, pkg: griffe.Module) -> str:
    """Returns the public name of a base class, or nothing if it has none."""
    parts = path.split(".")
    if parts[0] != pkg.name:
        return path
    *folders, name = [part for part in parts[1:] if not part.startswith("_")]
    module = pkg[".".join(folders)] if folders else pkg
    return ".".join((pkg.name, *folders, name)) if name in module.members else ""
