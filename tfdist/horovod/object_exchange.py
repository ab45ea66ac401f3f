"""Exchange of Python objects between the ranks, and broadcast of variables.

Objects are sent pickled, by cloudpickle. Unpickling runs code in the pickle, and the engine's connections authenticate nobody:
each object therefore carries a signature, HMAC-SHA256 under a key of the job, without which it is refused. Cost: 32 bytes, and
about a second per GB on each side.
"""

import hmac
from collections.abc import Sequence
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import numpy as np
import tensorflow as tf

from tfdist.errors import InputError
from tfdist.horovod.data_movement import allgather, broadcast
from tfdist.horovod.errors import NoGraphError, check_eager, check_no_session
from tfdist.horovod.process import engine
from tfdist.horovod.process_sets import global_process_set

_SIGNATURE = 32  # bytes of a signature


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
    data = _signed(obj, name) if is_root else np.zeros([0], np.uint8)
    size = broadcast(tf.constant([data.size], tf.int64), root_rank, f"{name}.sz", process_set=process_set)
    sent = data if is_root else np.zeros([int(size[0])], np.uint8)
    received = broadcast(tf.constant(sent, tf.uint8), root_rank, f"{name}.t", process_set=process_set)
    return obj if is_root else _loaded(received.numpy(), name)


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
    data = _signed(obj, name)
    sizes = allgather(tf.constant([data.size], tf.int64), f"{name}.sz", process_set=process_set).numpy()
    everything = allgather(tf.constant(data, tf.uint8), f"{name}.t", process_set=process_set).numpy()
    return [_loaded(part, name) for part in np.split(everything, np.cumsum(sizes)[:-1])]


def broadcast_variables(
    variables: Sequence[Any], root_rank: int, process_set: Any = global_process_set, inplace: bool = False
) -> Any:
    """Sets variables to those of one rank, on every rank.

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
    return tf.group(*_assigned(variables, root_rank, None, process_set))


def broadcast_(
    variables: Sequence[Any], root_rank: int, name: str | None = None, process_set: Any = global_process_set
) -> list[tf.Tensor]:
    """Sets variables to those of one rank; returns their values, available once they are assigned."""
    return [tf.convert_to_tensor(value) for value in _assigned(variables, root_rank, name, process_set)]


def _assigned(variables: Any, root_rank: int, name: str | None, process_set: Any) -> list[Any]:
    """Returns the results of the assignments of the root's values."""
    return [
        variable.assign(
            broadcast(tf.convert_to_tensor(variable), root_rank, name and f"{name}_{number}", process_set=process_set)
        )
        for number, variable in enumerate(_listed(variables))
    ]


def _listed(variables: Any) -> Sequence[Any]:
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


def _signed(obj: Any, name: str) -> np.ndarray:
    """Returns a pickled object behind its signature, as bytes."""
    pickled = cloudpickle.dumps(obj)
    return np.frombuffer(_signature(pickled, name) + pickled, np.uint8)


def _loaded(received: np.ndarray, name: str) -> Any:
    data = memoryview(received.tobytes())
    if not hmac.compare_digest(data[:_SIGNATURE], _signature(data[_SIGNATURE:], name)):
        raise InputError(
            f"An object of another rank must be signed with this job's token. Received: another signature, in {name!r}. "
            "Give all processes of a job the same TFDIST_TOKEN, or none; otherwise, someone has altered it on its way."
        )
    return cloudpickle.loads(data[_SIGNATURE:])


def _signature(pickled: bytes | memoryview, name: str) -> bytes:
    mac = hmac.new(engine().object_key.encode(), name.encode() + b"\0", "sha256")
    mac.update(pickled)
    return mac.digest()
