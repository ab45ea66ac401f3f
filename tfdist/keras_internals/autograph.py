"""Choice of the functions that AutoGraph converts: those of users, but not tfdist's own, which need no conversion.

AutoGraph parses and rewrites the source of every function on the way, which took a third of the processor time of a short run.
"""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx

_PACKAGE = __name__.partition(".")[0]


def without_autograph(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of tfdist for `tf.data`, whose code, and what it calls, is traced as it is written.

    What it calls of a user's must be called through `with_autograph`.
    """
    return tf.autograph.experimental.do_not_convert(function)


def with_autograph(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a user's function converted, as `tf.data` would do it, and one of tfdist unchanged."""
    if tf.executing_eagerly() or _is_own(function):
        return function
    enabled = ag_ctx.ControlStatusCtx(status=ag_ctx.Status.ENABLED)
    return tf.__internal__.autograph.tf_convert(function, enabled)


def _is_own(function: Callable[..., Any]) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__module__", "")).partition(".")[0] == _PACKAGE
