"""Errors of one line that programs catch as Horovod's: each is an `InputError` and the class that Horovod raises there."""

import tensorflow as tf

from tfdist.errors import InputError


class NotSupportedError(InputError, NotImplementedError):
    """What an operation cannot do, such as a maximum of `tf.IndexedSlices`."""


class NoGraphError(InputError, RuntimeError):
    """What works in the graphs and sessions of TensorFlow 1 only, or cannot work in them."""


class UnknownNameError(InputError, AttributeError):
    """A name of Horovod's that is not here; names what to use."""


class InvalidArgumentError(InputError, tf.errors.InvalidArgumentError):
    """An argument that no rank can use: a scalar, or a root that is not a rank of the call."""

    def __init__(self, message: str):
        """Args: message: one line."""
        tf.errors.InvalidArgumentError.__init__(self, None, None, message)
        self.args = (message,)


class FailedPreconditionError(InputError, tf.errors.FailedPreconditionError):
    """Calls of ranks that do not match, or that Horovod refuses once the ranks have compared them."""

    def __init__(self, message: str):
        """Args: message: one line."""
        tf.errors.FailedPreconditionError.__init__(self, None, None, message)
        self.args = (message,)


def check_eager(what: str, instead: str) -> None:
    """Raises `NoGraphError` unless calls run eagerly.

    Args:
      what: the call, as the error names it.
      instead: the remedy.
    """
    if not tf.executing_eagerly():
        kind = "tf.function" if tf.compat.v1.executing_eagerly_outside_functions() else "a graph of TensorFlow 1"
        raise NoGraphError(f"{what} runs eagerly. Received: a call in {kind}. {instead}.")


def check_no_old_graph(what: str) -> None:
    """Raises `NoGraphError` in a graph of TensorFlow 1, which a session runs. Args: what: the call, as the error names it."""
    if not tf.compat.v1.executing_eagerly_outside_functions():
        raise NoGraphError(
            f"{what} in a graph of TensorFlow 1 needs Horovod. Received: a job on tf.distribute's collectives, which sessions "
            "cannot run. Call it eagerly or in a tf.function."
        )


def check_no_session(session: object) -> None:
    """Raises `NoGraphError` for a session, which TensorFlow 2 has none of."""
    if session is not None:
        raise NoGraphError(f"TensorFlow 2 has no sessions. Received: session={session!r}. Leave it out.")
