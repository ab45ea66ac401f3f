"""Names of calls: the user's, or a generated one that is the same on every rank."""

import itertools
import re
import weakref
from typing import Any

import tensorflow as tf

from tfdist.horovod.engine import CallId

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_./-]")
_counters: weakref.WeakKeyDictionary[Any, itertools.count] = weakref.WeakKeyDictionary()


def call_of(operation: str, name: str | None, process_set: Any, ignore_name_scope: bool = False) -> CallId:
    """Returns the call of an operation.

    Without a name, calls are numbered within their graph, in the order of tracing, so that ranks that trace the same
    code match, however often each has traced before. Eager calls are sequential, and the name of the operation
    suffices.

    Args:
      operation: name of the operation.
      name: the user's name, or None.
      process_set: the ranks that make the call.
      ignore_name_scope: whether TensorFlow's name scopes are left out of the name.
    """
    if name:
        clean = _NOT_IN_NAMES.sub("_", name)
        clean = clean if clean[0].isalnum() else f"x{clean}"
        return CallId(clean, process_set, explicit=True, ignore_name_scope=ignore_name_scope)
    if tf.executing_eagerly():
        return CallId(operation, process_set, ignore_name_scope=ignore_name_scope)
    number = next(_counters.setdefault(tf.compat.v1.get_default_graph(), itertools.count()))
    return CallId(f"{operation}_{number}", process_set, ignore_name_scope=ignore_name_scope)
