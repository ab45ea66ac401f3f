"""Replaces attributes of objects, classes and modules, and values of context variables, temporarily."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any, TypeAlias, TypeVar

Context: TypeAlias = contextlib.AbstractContextManager[None]
Value = TypeVar("Value")
_INHERITED = object()


@contextlib.contextmanager
def patched(*patches: tuple[Any, str, Any]) -> Iterator[None]:
    """Context that replaces attributes temporarily; on exit, the replacement of an inherited attribute is deleted.

    Each patch consists of an object, class or module, the name of its attribute, and the value inside the context.
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


@contextlib.contextmanager
def context_value(variable: contextvars.ContextVar[Value], value: Value) -> Iterator[None]:
    """Context in which a context variable has the given value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
