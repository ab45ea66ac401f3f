"""Exchange of Python objects between the ranks, and broadcast of variables.

Objects are sent pickled, by cloudpickle, and signed (`tfdist.horovod.object_signatures`); without a valid signature, they are
refused and not unpickled.
"""

from collections.abc import Sequence
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import numpy as np
import tensorflow as tf

from tfdist.horovod.data_movement import allgather, broadcast
from tfdist.horovod.errors import NoGraphError, check_eager, check_no_session
from tfdist.horovod.object_signatures import SIGNATURE, next_call
from tfdist.horovod.process import engine
from tfdist.horovod.process_sets import global_process_set


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
    everything = allgather(signed, f"{name}.t", process_set=process_set).numpy()
    parts = zip(np.split(everything, np.cumsum(sizes)[:-1]), process_set.ranks, strict=True)
    return [cloudpickle.loads(call.verified(part, sender)) for part, sender in parts]


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
