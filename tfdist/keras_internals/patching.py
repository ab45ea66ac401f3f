"""Temporary replacement of attributes of objects, classes and modules."""

import contextlib
from collections.abc import Iterator
from typing import Any

_INHERITED = object()


@contextlib.contextmanager
def patched(*patches: tuple[Any, str, Any]) -> Iterator[None]:
    """Context in which attributes have other values.

    Args:
      *patches: an object, class or module, the name of its attribute, and the value inside the context. An attribute that
        it inherits from its class or base class is deleted on exit.
    """
    originals = [vars(target).get(name, _INHERITED) for target, name, _ in patches]
    try:
        for target, name, value in patches:
            setattr(target, name, value)
        yield
    finally:
        for (target, name, _), original in zip(patches, originals, strict=True):
            if original is _INHERITED:
                delattr(target, name)
            else:
                setattr(target, name, original)
