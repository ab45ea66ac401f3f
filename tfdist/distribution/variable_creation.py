"""Variables that several processes create together: checks that all create the same, and names the first difference."""

import re
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.coordination import Group
from tfdist.coordination.timeouts import long_timeout


class VariableCreation:
    """Makes all ranks agree on each variable before it is created, for an engine that then broadcasts rank 0's value.

    Otherwise a broadcast between different shapes would fail without naming the variable, and a rank that creates an
    additional variable would wait forever. Costs one small message of the group per variable.
    """

    def __init__(self, group: Group):
        """Starts to count variables.

        Args:
          group: group of all ranks.
        """
        self._group = group
        self._count = 0
        self._agreeing = False  # scopes may be nested

    def agree(self, next_creator: Callable[..., tf.Variable], **arguments: Any) -> tf.Variable:
        """Creates a variable after all ranks have agreed on it; for `tf.variable_creator_scope`.

        Args:
          next_creator: creates the variable.
          **arguments: arguments of `next_creator`.

        Raises:
          InputError: another rank creates a different variable.
          PeerLostError: another rank creates none.
        """
        if self._agreeing:
            return next_creator(**arguments)
        value: Any = arguments.get("initial_value")
        if tf.executing_eagerly() and callable(value):
            value = arguments["initial_value"] = value()
        self._count += 1
        form = f" {tf.as_dtype(value.dtype).name}{list(value.shape)}" if hasattr(value, "dtype") else ""
        said = f"{without_numbers(str(arguments.get('name')))}{form}"
        with long_timeout("its data or its weights") as deadline:
            self._group.agree(f"variable/{self._count}", {f"variable number {self._count}": said}, deadline=deadline)
        self._agreeing = True
        try:
            return next_creator(**arguments)
        finally:
            self._agreeing = False


def without_numbers(name: str) -> str:
    """Removes from a name the counters that Keras appends, which may differ between processes."""
    return re.sub(r"_\d+(?=/|_|$)", "", name)
