"""One-line errors; each class is derived from `InputError` and from the class that Horovod raises."""

import tensorflow as tf

from tfdist.errors import InputError


class NotSupportedError(InputError, NotImplementedError):
    """Raised for an unsupported operation, such as a maximum of `tf.IndexedSlices`."""


class GraphModeError(InputError, RuntimeError):
    """Raised for calls in a graph that must run eagerly, and for calls that need a TensorFlow 1 graph or session."""


class UnknownNameError(InputError, AttributeError):
    """Raised for Horovod names that `tfdist.horovod` does not provide; the message names the alternative."""


class _OpError(InputError):
    def __init__(self, message: str):
        super(ValueError, self).__init__(None, None, message)  # the constructor of TensorFlow's class
        self.args = (message,)


class InvalidArgumentError(_OpError, tf.errors.InvalidArgumentError):
    """Raised for arguments that are invalid on every rank: a scalar, or a root that is not a rank of the call."""


class FailedPreconditionError(_OpError, tf.errors.FailedPreconditionError):
    """Raised if the ranks' calls do not match, or if Horovod rejects them after a comparison."""


def check_eager(call_name: str, alternative: str) -> None:
    """Raises `GraphModeError` in a graph, with the name of the call and an alternative."""
    if not tf.executing_eagerly():
        kind = "tf.function" if tf.compat.v1.executing_eagerly_outside_functions() else "a graph of TensorFlow 1"
        raise GraphModeError(f"{call_name} must run eagerly. Received: a call in {kind}. {alternative}.")


def check_no_session(session: object) -> None:
    """Raises `GraphModeError` for a session, which does not exist in TensorFlow 2."""
    if session is not None:
        raise GraphModeError(f"TensorFlow 2 has no sessions. Received: session={session!r}. Remove it.")
