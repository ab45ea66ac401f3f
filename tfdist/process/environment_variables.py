"""Environment variables that are set for a while only."""

import contextlib
import os
from collections.abc import Iterator, Mapping


@contextlib.contextmanager
def environment_variables(values: Mapping[str, str]) -> Iterator[None]:
    """Context in which environment variables have the given values; restores them at its end.

    For what a library reads when it starts, and neither a later start nor a child process should inherit.

    Args:
      values: values by name.
    """
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
