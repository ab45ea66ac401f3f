"""A method that says "See base class." overrides one: a method under another name would be called by nobody."""

import importlib
import inspect
import pkgutil
from collections.abc import Iterator

import pytest

import tfdist


def classes() -> Iterator[type]:
    for found in pkgutil.walk_packages(tfdist.__path__, "tfdist."):
        module = importlib.import_module(found.name)
        yield from (one for one in vars(module).values() if inspect.isclass(one) and one.__module__ == found.name)


def overrides(one: type) -> list[str]:
    """Returns the names of what a class says to override."""
    members = {name: value.fget if isinstance(value, property) else value for name, value in vars(one).items()}
    texts = {name: inspect.getdoc(value) for name, value in members.items() if "__doc__" in dir(value)}
    return [name for name, text in texts.items() if text and text.startswith("See base class")]


@pytest.mark.tensorflow
def test_what_says_so_overrides_something():
    found = [(one, name) for one in classes() for name in overrides(one)]
    assert len(found) > 200
    alone = [f"{one.__module__}.{one.__name__}.{name}" for one, name in found if not hasattr(super(one, one), name)]
    assert alone == []
