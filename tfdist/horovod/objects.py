"""Python objects between the ranks, and variables made equal.

Objects travel pickled, by cloudpickle. Who unpickles runs what the pickle says: they travel between this job's own ranks
alone, over the engine's connections, which belong on a trusted network.
"""

import io
from collections.abc import Sequence
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import numpy as np
import tensorflow as tf

from tfdist.horovod.errors import NoGraphError, check_eager, check_no_session
from tfdist.horovod.moves import allgather, broadcast
from tfdist.horovod.process import engine
from tfdist.horovod.process_sets import global_process_set


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: None = None,
    name: str | None = None,
    process_set: Any = global_process_set,
) -> Any:
    """The object of one rank, on every rank; pickled between this job's own ranks.

    Args:
      obj: what can be pickled; only the root's counts.
      root_rank: a rank of the job.
      session: None: TensorFlow 2 has no sessions.
      name: names the call, the same on every rank.
      process_set: the ranks that make the call.
    """
    check_no_session(session)
    check_eager("hvd.broadcast_object", "Call it outside of graphs")
    name, is_root = name or "broadcast_object", engine().rank == root_rank
    data = np.frombuffer(cloudpickle.dumps(obj), np.uint8) if is_root else np.zeros([0], np.uint8)
    size = broadcast(tf.constant([data.size], tf.int64), root_rank, f"{name}.sz", process_set=process_set)
    sent = data if is_root else np.zeros([int(size[0])], np.uint8)
    received = broadcast(tf.constant(sent, tf.uint8), root_rank, f"{name}.t", process_set=process_set)
    return obj if is_root else _loaded(received.numpy())


def allgather_object(
    obj: Any, session: None = None, name: str | None = None, process_set: Any = global_process_set
) -> list[Any]:
    """The objects of all ranks, in the order of ranks; pickled between this job's own ranks.

    Args:
      obj: what can be pickled.
      session: None: TensorFlow 2 has no sessions.
      name: names the call, the same on every rank.
      process_set: the ranks that make the call.
    """
    check_no_session(session)
    check_eager("hvd.allgather_object", "Call it outside of graphs")
    name = name or "allgather_object"
    data = np.frombuffer(cloudpickle.dumps(obj), np.uint8)
    sizes = allgather(tf.constant([data.size], tf.int64), f"{name}.sz", process_set=process_set).numpy()
    everything = allgather(tf.constant(data, tf.uint8), f"{name}.t", process_set=process_set).numpy()
    return [_loaded(part) for part in np.split(everything, np.cumsum(sizes)[:-1])]


def broadcast_variables(
    variables: Sequence[Any], root_rank: int, process_set: Any = global_process_set, inplace: bool = False
) -> Any:
    """Makes variables equal to those of one rank, on every rank.

    Args:
      variables: of Keras or TensorFlow, of the same shapes and dtypes in the same order on every rank; a list, or the
        method `variables` of an optimizer of one's own.
      root_rank: a rank of the job.
      process_set: the ranks that make the call.
      inplace: taken, and without effect.

    Returns:
      In a graph the operation that has assigned all of them, which a `tf.control_dependencies` can wait for; None where the
      call runs eagerly, and has done so when it returns.
    """
    return tf.group(*_assigned(variables, root_rank, None, process_set))


def broadcast_(
    variables: Sequence[Any], root_rank: int, name: str | None = None, process_set: Any = global_process_set
) -> list[tf.Tensor]:
    """Makes variables equal to those of one rank, and returns their values, which are there when they are assigned."""
    return [tf.convert_to_tensor(value) for value in _assigned(variables, root_rank, name, process_set)]


def _assigned(variables: Any, root_rank: int, name: str | None, process_set: Any) -> list[Any]:
    """What the assignments of the root's values return."""
    return [
        variable.assign(
            broadcast(tf.convert_to_tensor(variable), root_rank, name and f"{name}_{number}", process_set=process_set)
        )
        for number, variable in enumerate(_listed(variables))
    ]


def _listed(variables: Any) -> Sequence[Any]:
    """The variables themselves, or what the method `variables` of an optimizer of one's own returns."""
    return variables() if callable(variables) and not isinstance(variables, list) else variables


def broadcast_global_variables(root_rank: int) -> None:
    """TensorFlow 1's; raises `NoGraphError` with what to use."""
    raise NoGraphError(
        f"TensorFlow 2 has no global variables. Received: broadcast_global_variables({root_rank}). Use "
        "hvd.broadcast_variables(model.variables, root_rank) or hvd.callbacks.BroadcastGlobalVariablesCallback."
    )


def broadcast_object_fn(
    root_rank: int = 0, session: None = None, name: str | None = None, process_set: Any = global_process_set
) -> None:
    """TensorFlow 1's; raises `NoGraphError` with what to use."""
    raise NoGraphError("TensorFlow 2 has no sessions. Received: broadcast_object_fn. Use hvd.broadcast_object.")


def _loaded(data: np.ndarray) -> Any:
    return cloudpickle.load(io.BytesIO(data.tobytes()))
