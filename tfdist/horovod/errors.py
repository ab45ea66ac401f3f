"""One-line errors that can be caught as Horovod's: each is an `InputError` and of the class that Horovod raises."""

import tensorflow as tf

from tfdist.errors import InputError


class NotSupportedError(InputError, NotImplementedError):
    """An operation does not support something, such as a maximum of `tf.IndexedSlices`."""


class NoGraphError(InputError, RuntimeError):
    """Something works only in TensorFlow 1 graphs and sessions, or cannot work in them."""


class UnknownNameError(InputError, AttributeError):
    """A name of Horovod is not provided; names the alternative."""


class InvalidArgumentError(InputError, tf.errors.InvalidArgumentError):
    """An argument is invalid on every rank: a scalar, or a root that is not a rank of the call."""

    def __init__(self, message: str):
        tf.errors.InvalidArgumentError.__init__(self, None, None, message)
        self.args = (message,)


class FailedPreconditionError(InputError, tf.errors.FailedPreconditionError):
    """Calls of ranks do not match, or Horovod rejects them after the ranks have compared them."""

    def __init__(self, message: str):
        tf.errors.FailedPreconditionError.__init__(self, None, None, message)
        self.args = (message,)


def check_eager(what: str, alternative: str) -> None:
    """Raises `NoGraphError` unless calls run eagerly, with the name of the call and an alternative."""
    if not tf.executing_eagerly():
        kind = "tf.function" if tf.compat.v1.executing_eagerly_outside_functions() else "a graph of TensorFlow 1"
        raise NoGraphError(f"{what} runs eagerly. Received: a call in {kind}. {alternative}.")


def check_no_old_graph(what: str) -> None:
    """Raises `NoGraphError`, with the name of the call, in a TensorFlow 1 graph, which is run by a session."""
    if not tf.compat.v1.executing_eagerly_outside_functions():
        raise NoGraphError(
            f"{what} in a graph of TensorFlow 1 needs Horovod. Received: a job on tf.distribute's collectives, which sessions "
            "cannot run. Call it eagerly or in a tf.function."
        )


def check_no_session(session: object) -> None:
    """Raises `NoGraphError` for a session, which does not exist in TensorFlow 2."""
    if session is not None:
        raise NoGraphError(f"TensorFlow 2 has no sessions. Received: session={session!r}. Leave it out.")
