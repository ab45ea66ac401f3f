"""Variables that several processes make together: each is the same one on all of them, or the first that is not is named."""

import re
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.coordination import Group
from tfdist.coordination.timeouts import long_timeout


class VariableCreation:
    """Makes all ranks agree on each variable before it is made, for an engine that then sends rank 0's value to the others.

    Between different shapes that would fail without the variable's name, and a rank that makes one more would wait for ever.
    One small message of the group a variable.
    """

    def __init__(self, group: Group):
        """Args: group: of all ranks."""
        self._group = group
        self._count = 0
        self._agreeing = False  # scopes may stand in one another

    def agree(self, next_creator: Callable[..., tf.Variable], **arguments: Any) -> tf.Variable:
        """For `tf.variable_creator_scope`.

        Raises:
          InputError: another rank makes another variable.
          PeerLostError: another rank makes none.
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
    """A name without the numbers by which Keras counts what a process has made, which may be more here than there."""
    return re.sub(r"_\d+(?=/|_|$)", "", name)
