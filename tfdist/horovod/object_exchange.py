"""Exchange of Python objects between ranks, and broadcast of variables.

Objects are pickled by cloudpickle and signed. Objects without a valid signature are never unpickled.
"""

import collections
import hmac
import secrets
import threading
import weakref
from collections.abc import Sequence
from typing import Any, TypeAlias

import cloudpickle  # type: ignore[import-untyped]
import numpy as np
import tensorflow as tf

from tfdist.errors import InputError
from tfdist.horovod.engine import Engine
from tfdist.horovod.errors import GraphModeError, check_eager, check_no_session
from tfdist.horovod.operations import allgather, broadcast
from tfdist.horovod.process import engine
from tfdist.horovod.process_sets import global_process_set

# Objects are signed, because unpickling runs code and the engine has no authentication. A signature is an HMAC-SHA256 with a
# key of the job. Before their first object, the ranks of a process set exchange nonces on which the key depends, so that no
# rank accepts an object that was signed before it started the engine. The signature covers the operation, the call's name, its
# index among the calls with this name, the sender's rank, and the object.
#
# Cost: 32 bytes and about a second per GB on each side; a small all-gather per process set each time the engine starts.

_MAC_BYTES = 32
_NONCE_BYTES = 16

# For each engine and process set, the ranks and their nonces, and the counts of calls by operation and name.
_Sessions: TypeAlias = dict[tuple[int, ...], tuple[bytes, collections.Counter[tuple[str, str]]]]
_sessions_by_engine: weakref.WeakKeyDictionary[Engine, _Sessions] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


class Call:
    """Signs and verifies the objects of one exchange; the first exchange of a process set also exchanges nonces."""

    def __init__(self, operation: str, name: str, process_set: Any):
        sessions, ranks = _sessions_by_engine.setdefault(engine(), {}), tuple(process_set.ranks)
        with _lock:
            if ranks not in sessions:
                sessions[ranks] = _new_session(process_set), collections.Counter()
            session, call_counts = sessions[ranks]
            self._name, self._identity = name, (operation, name, call_counts[operation, name])
            call_counts[operation, name] += 1
        self._key = hmac.digest(engine().object_key.encode(), session, "sha256")

    def sign(self, data: bytes, sender: int) -> np.ndarray:
        """Returns the message of rank `sender`: the signature and the pickled object."""
        return np.frombuffer(self._signature(data, sender) + data, np.uint8)

    def verify(self, message: np.ndarray, sender: int) -> memoryview:
        """Returns the pickled object in a message; raises `InputError` unless rank `sender` has signed it."""
        data = memoryview(message.tobytes())
        if not hmac.compare_digest(data[:_MAC_BYTES], self._signature(data[_MAC_BYTES:], sender)):
            raise InputError(
                "An object of another rank must be signed with this job's token. Received: another signature, in "
                f"{self._name!r}. Set the same TFDIST_TOKEN, or none, for all processes of a job; if this is so, the "
                "object was altered in transit."
            )
        return data[_MAC_BYTES:]

    def _signature(self, data: bytes | memoryview, sender: int) -> bytes:
        mac = hmac.new(self._key, repr((*self._identity, sender)).encode() + b"\0", "sha256")
        mac.update(data)
        return mac.digest()


def _new_session(process_set: Any) -> bytes:
    """Returns the ranks of a set and their nonces; only this rank's nonce is authentic."""
    nonce, ranks = secrets.token_bytes(_NONCE_BYTES), list(process_set.ranks)
    message = tf.constant(np.frombuffer(nonce, np.uint8))
    nonces = allgather(message, "object_nonces", process_set=process_set).numpy().tobytes()
    offset = ranks.index(engine().rank) * _NONCE_BYTES
    return repr(ranks).encode() + b"\0" + nonces[:offset] + nonce + nonces[offset + _NONCE_BYTES :]


def broadcast_object(  # noqa: D417
    obj: Any,
    root_rank: int = 0,
    session: None = None,
    name: str | None = None,
    process_set: Any = global_process_set,
) -> Any:
    """Returns the object of one rank on every rank. The object is pickled and signed.

    Args:
      obj: an object that can be pickled; ignored except on the root.
      root_rank: a rank of the job.
      session: must be None, because TensorFlow 2 has no sessions. For the other arguments, see `allreduce`.

    Raises:
      InputError: an object is not signed with this job's token.
    """
    check_no_session(session)
    check_eager("hvd.broadcast_object", "Call it outside of graphs")
    name, is_root = name or "broadcast_object", engine().rank == root_rank
    data = cloudpickle.dumps(obj) if is_root else b""
    size = broadcast(tf.constant([len(data)], tf.int64), root_rank, f"{name}.sz", process_set=process_set)
    call = Call("broadcast_object", name, process_set)
    message = call.sign(data, root_rank) if is_root else np.zeros([_MAC_BYTES + int(size[0])], np.uint8)
    result = broadcast(tf.constant(message, tf.uint8), root_rank, f"{name}.t", process_set=process_set)
    return obj if is_root else cloudpickle.loads(call.verify(result.numpy(), root_rank))


def allgather_object(
    obj: Any, session: None = None, name: str | None = None, process_set: Any = global_process_set
) -> list[Any]:
    """Returns the objects of all ranks, in the order of ranks. The objects are pickled and signed.

    For the arguments, see `broadcast_object`.

    Raises:
      InputError: an object is not signed with this job's token.
    """
    check_no_session(session)
    check_eager("hvd.allgather_object", "Call it outside of graphs")
    name = name or "allgather_object"
    data = cloudpickle.dumps(obj)
    sizes = _MAC_BYTES + allgather(tf.constant([len(data)], tf.int64), f"{name}.sz", process_set=process_set).numpy()
    call = Call("allgather_object", name, process_set)
    message = tf.constant(call.sign(data, engine().rank), tf.uint8)
    messages = np.split(allgather(message, f"{name}.t", process_set=process_set).numpy(), np.cumsum(sizes)[:-1])
    return [cloudpickle.loads(call.verify(m, rank)) for m, rank in zip(messages, process_set.ranks, strict=True)]


def broadcast_variables(
    variables: Sequence[Any], root_rank: int, process_set: Any = global_process_set, inplace: bool = False
) -> Any:
    """Sets variables to the values of one rank, on every rank.

    Args:
      variables: Keras or TensorFlow variables, with the same shapes and dtypes in the same order on every rank; a list,
        or the method `variables` of a custom optimizer.
      root_rank: a rank of the job.
      process_set: the ranks that make the call.
      inplace: accepted, but has no effect.

    Returns:
      In a graph, the operation that assigns all variables, for `tf.control_dependencies`; None if the call runs eagerly.
    """
    return tf.group(*_assign_broadcast(variables, root_rank, None, process_set))


def broadcast_(
    variables: Sequence[Any], root_rank: int, name: str | None = None, process_set: Any = global_process_set
) -> list[tf.Tensor]:
    """Sets variables to the values of one rank, and returns the values."""
    return [tf.convert_to_tensor(value) for value in _assign_broadcast(variables, root_rank, name, process_set)]


def _assign_broadcast(variables: Any, root_rank: int, name: str | None, process_set: Any) -> list[Any]:
    if callable(variables) and not isinstance(variables, list):
        variables = variables()
    return [
        variable.assign(
            broadcast(tf.convert_to_tensor(variable), root_rank, name and f"{name}_{index}", process_set=process_set)
        )
        for index, variable in enumerate(variables)
    ]


def broadcast_global_variables(root_rank: int) -> None:
    """A function of TensorFlow 1; raises `GraphModeError` with the alternative."""
    raise GraphModeError(
        f"TensorFlow 2 has no global variables. Received: broadcast_global_variables({root_rank}). Use "
        "hvd.broadcast_variables(model.variables, root_rank) or hvd.callbacks.BroadcastGlobalVariablesCallback."
    )


def broadcast_object_fn(
    root_rank: int = 0, session: None = None, name: str | None = None, process_set: Any = global_process_set
) -> None:
    """A function of TensorFlow 1; raises `GraphModeError` with the alternative."""
    raise GraphModeError("TensorFlow 2 has no sessions. Received: broadcast_object_fn. Use hvd.broadcast_object.")
