"""Errors of the library name arguments (`batch_size=7`), those of commands the flags (`--batch_size=7`).

Messages are written for commands, and translated where a public function of the library raises them.
"""

import contextlib
import contextvars
import functools
import re
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

from tfdist.errors.exceptions import TfdistError

P = ParamSpec("P")
R = TypeVar("R")

_FLAG = re.compile(r"(?<![\w-])--(?=[a-z])")
_in_command = contextvars.ContextVar("in_command", default=False)


def naming_flags() -> contextlib.AbstractContextManager[None]:
    """Returns the context of a command, in which errors name flags."""
    return _naming(True)


def naming_arguments() -> contextlib.AbstractContextManager[None]:
    """Returns the context of a user's program that a command runs, in which errors name arguments."""
    return _naming(False)


@contextlib.contextmanager
def _naming(flags: bool) -> Iterator[None]:
    token = _in_command.set(flags)
    try:
        yield
    finally:
        _in_command.reset(token)


def names_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a public function of the library, whose errors name arguments unless a command calls it."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except TfdistError as error:
            if error.args and isinstance(error.args[0], str):
                error.args = (with_argument_names(error.args[0]), *error.args[1:])
            raise

    return call


def with_argument_names(message: str) -> str:
    """Returns a message that names flags as it is in a command, and with arguments instead outside of commands.

    Quoted commands keep their flags.
    """
    if _in_command.get():
        return message
    parts = message.split("`")
    return "`".join(part if index % 2 else _FLAG.sub("", part) for index, part in enumerate(parts))
