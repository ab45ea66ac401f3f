"""Temporary replacement of attributes of objects, classes and modules."""

import contextlib
from collections.abc import Iterator
from typing import Any, TypeAlias

Context: TypeAlias = contextlib.AbstractContextManager[None]
_INHERITED = object()


@contextlib.contextmanager
def patched(*patches: tuple[Any, str, Any]) -> Iterator[None]:
    """Context that replaces attributes temporarily; on exit, an attribute that was inherited is deleted again.

    Each of the `patches` is an object, class or module, the name of its attribute, and the value inside the context.
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
