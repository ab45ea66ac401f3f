"""Exchange of Python objects between the ranks, signed, and broadcast of variables.

Objects are pickled by cloudpickle and signed. An object without a valid signature is refused and never unpickled.
"""

import collections
import hmac
import secrets
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import numpy as np
import tensorflow as tf

from tfdist.errors import InputError
from tfdist.horovod.data_movement import allgather, broadcast
from tfdist.horovod.engine import Engine
from tfdist.horovod.errors import NoGraphError, check_eager, check_no_session
from tfdist.horovod.process import engine
from tfdist.horovod.process_sets import global_process_set

# Signatures of the pickled objects that ranks exchange: unpickling runs code, and the engine has no authentication.
# A signature is an HMAC-SHA256 under a key of the job. The ranks of a process set exchange nonces before their first object,
# and the key depends on all of them, so no rank accepts an object that was signed before it started the engine. The signature
# covers the operation, the call's name, its number among the calls with this name, the sender's rank, and the object.
#
# Cost: 32 bytes and about a second per GB on each side; one small all-gather per process set and start of the engine.

SIGNATURE = 32  # bytes
_NONCE = 16  # bytes

_signatures: weakref.WeakKeyDictionary[Engine, dict[tuple[int, ...], "Signatures"]] = weakref.WeakKeyDictionary()


class Call:
    """One exchange of objects, the same on all ranks that take part; signs and verifies its objects.

    Args:
      key: key of the ranks that take part.
      operation: name of the function.
      name: name of the call.
      number: number of earlier calls of this operation with this name.
    """

    def __init__(self, key: bytes, operation: str, name: str, number: int):
        self._key, self._name, self._identity = key, name, (operation, name, number)

    def signed(self, pickled: bytes, sender: int) -> np.ndarray:
        """Returns the signature and the pickled object of rank `sender`, as bytes."""
        return np.frombuffer(self._signature(pickled, sender) + pickled, np.uint8)

    def verified(self, received: np.ndarray, sender: int) -> memoryview:
        """Returns the pickled object that rank `sender` has signed; raises `InputError` if that rank has not signed it."""
        data = memoryview(received.tobytes())
        if not hmac.compare_digest(data[:SIGNATURE], self._signature(data[SIGNATURE:], sender)):
            raise InputError(
                "An object of another rank must be signed with this job's token. Received: another signature, in "
                f"{self._name!r}. Give all processes of a job the same TFDIST_TOKEN, or none; if they do, the "
                "object was altered in transit."
            )
        return data[SIGNATURE:]

    def _signature(self, pickled: bytes | memoryview, sender: int) -> bytes:
        mac = hmac.new(self._key, repr((*self._identity, sender)).encode() + b"\0", "sha256")
        mac.update(pickled)
        return mac.digest()


class Signatures:
    """The calls of a process set, from one start of the engine to its end."""

    def __init__(self) -> None:
        self._session = b""  # the ranks and their nonces, once they are exchanged
        self._numbers: collections.Counter[tuple[str, str]] = collections.Counter()
        self._lock = threading.Lock()

    def next_call(self, operation: str, name: str, process_set: Any) -> Call:
        """Returns the next call of an operation with this name, which all ranks of the set make in the same order.

        At the first call of any operation, the ranks exchange their nonces.
        """
        with self._lock:
            self._session = self._session or _new_session(process_set)
            number = self._numbers[operation, name]
            self._numbers[operation, name] += 1
        key = hmac.digest(engine().object_key.encode(), self._session, "sha256")
        return Call(key, operation, name, number)


def next_call(operation: str, name: str, process_set: Any) -> Call:
    """Returns the next call on a process set; see `Signatures.next_call`."""
    signatures = _signatures.setdefault(engine(), {}).setdefault(tuple(process_set.ranks), Signatures())
    return signatures.next_call(operation, name, process_set)


def _new_session(process_set: Any) -> bytes:
    """Returns the ranks of a set and their nonces, which are not authenticated, except for this rank's own."""
    nonce, ranks = secrets.token_bytes(_NONCE), list(process_set.ranks)
    sent = tf.constant(np.frombuffer(nonce, np.uint8))
    nonces = allgather(sent, "object_nonces", process_set=process_set).numpy().tobytes()
    offset = ranks.index(engine().rank) * _NONCE
    return repr(ranks).encode() + b"\0" + nonces[:offset] + nonce + nonces[offset + _NONCE :]


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: None = None,
    name: str | None = None,
    process_set: Any = global_process_set,
) -> Any:
    """Returns the object of one rank on every rank; sent pickled between this job's own ranks.

    Args:
      obj: an object that can be pickled; used on the root only.
      root_rank: a rank of the job.
      session: None: TensorFlow 2 has no sessions.
      name: name of the call, the same on every rank.
      process_set: the ranks that make the call.

    Raises:
      InputError: an object is not signed with this job's token.
    """
    check_no_session(session)
    check_eager("hvd.broadcast_object", "Call it outside of graphs")
    name, is_root = name or "broadcast_object", engine().rank == root_rank
    pickled = cloudpickle.dumps(obj) if is_root else b""
    size = broadcast(tf.constant([len(pickled)], tf.int64), root_rank, f"{name}.sz", process_set=process_set)
    call = next_call("broadcast_object", name, process_set)
    sent = call.signed(pickled, root_rank) if is_root else np.zeros([SIGNATURE + int(size[0])], np.uint8)
    received = broadcast(tf.constant(sent, tf.uint8), root_rank, f"{name}.t", process_set=process_set)
    return obj if is_root else cloudpickle.loads(call.verified(received.numpy(), root_rank))


def allgather_object(
    obj: Any, session: None = None, name: str | None = None, process_set: Any = global_process_set
) -> list[Any]:
    """Returns the objects of all ranks, in the order of ranks; sent pickled between this job's own ranks.

    Args:
      obj: an object that can be pickled.
      session: None: TensorFlow 2 has no sessions.
      name: name of the call, the same on every rank.
      process_set: the ranks that make the call.

    Raises:
      InputError: an object is not signed with this job's token.
    """
    check_no_session(session)
    check_eager("hvd.allgather_object", "Call it outside of graphs")
    name = name or "allgather_object"
    pickled = cloudpickle.dumps(obj)
    sizes = SIGNATURE + allgather(tf.constant([len(pickled)], tf.int64), f"{name}.sz", process_set=process_set).numpy()
    call = next_call("allgather_object", name, process_set)
    signed = tf.constant(call.signed(pickled, engine().rank), tf.uint8)
    gathered = allgather(signed, f"{name}.t", process_set=process_set).numpy()
    parts = zip(np.split(gathered, np.cumsum(sizes)[:-1]), process_set.ranks, strict=True)
    return [cloudpickle.loads(call.verified(part, sender)) for part, sender in parts]


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
      In a graph, the operation that assigns all of them, for `tf.control_dependencies`; None if the call runs eagerly,
      in which case it is complete on return.
    """
    return tf.group(*_assign_broadcast(variables, root_rank, None, process_set))


def broadcast_(
    variables: Sequence[Any], root_rank: int, name: str | None = None, process_set: Any = global_process_set
) -> list[tf.Tensor]:
    """Sets variables to the values of one rank; returns their values, available once they are assigned."""
    return [tf.convert_to_tensor(value) for value in _assign_broadcast(variables, root_rank, name, process_set)]


def _assign_broadcast(variables: Any, root_rank: int, name: str | None, process_set: Any) -> list[Any]:
    """Assigns the root's values to variables; returns the results of the assignments."""
    return [
        variable.assign(
            broadcast(tf.convert_to_tensor(variable), root_rank, name and f"{name}_{number}", process_set=process_set)
        )
        for number, variable in enumerate(_variable_list(variables))
    ]


def _variable_list(variables: Any) -> Sequence[Any]:
    """Returns the variables, or the result of a custom optimizer's method `variables`."""
    return variables() if callable(variables) and not isinstance(variables, list) else variables


def broadcast_global_variables(root_rank: int) -> None:
    """A function of TensorFlow 1; raises `NoGraphError` with the alternative."""
    raise NoGraphError(
        f"TensorFlow 2 has no global variables. Received: broadcast_global_variables({root_rank}). Use "
        "hvd.broadcast_variables(model.variables, root_rank) or hvd.callbacks.BroadcastGlobalVariablesCallback."
    )


def broadcast_object_fn(
    root_rank: int = 0, session: None = None, name: str | None = None, process_set: Any = global_process_set
) -> None:
    """A function of TensorFlow 1; raises `NoGraphError` with the alternative."""
    raise NoGraphError("TensorFlow 2 has no sessions. Received: broadcast_object_fn. Use hvd.broadcast_object.")
