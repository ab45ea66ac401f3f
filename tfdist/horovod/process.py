"""Initialization, shutdown, and Horovod's queries for ranks and build options.

As in Horovod, the engine is global state.
"""

import atexit
import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.coordination import Group
from tfdist.coordination.client import goodbye_of, is_planned
from tfdist.errors import InputError, TfdistError
from tfdist.horovod.engine import Engine, horovod_required_error

_engines: list[Engine] = []  # the engine in use, if any
# The job's group, joined once per process, even if the engine then fails, and left at exit.
_groups: list[Group] = []
on_init: list[Callable[[], None]] = []  # functions of modules that import this module


def init(comm: Any = None, process_sets: Sequence[Any] | str | None = None) -> None:
    """Starts the engine: Horovod or, if it is not installed, tf.distribute's collectives. Must be called first.

    The processes are started by `tfdist launch` (with either launcher), horovodrun, mpirun or srun; otherwise there is a
    single process. Further calls have no effect.

    Args:
      comm: Horovod's argument: ranks of the job, or an MPI communicator.
      process_sets: Horovod's argument: initial process sets, or "dynamic".

    Raises:
      InputError: the environment is invalid, or an argument needs Horovod.
      PeerLostError: a process did not join in time.
    """
    if _engines:
        return
    options = {k: v for k, v in (("comm", comm), ("process_sets", process_sets)) if v is not None}
    try:
        _engines.append(_start_engine(options))
    finally:
        _leave_at_exit()
    for callback in on_init:
        callback()


def _start_engine(options: dict[str, Any]) -> Engine:
    if horovod_is_installed():
        from tfdist.horovod.horovod_engine import HorovodEngine

        return HorovodEngine(_groups[0] if _groups else None, on_join=_groups.append, **options)
    from tfdist.horovod.tensorflow_engine import TensorFlowEngine

    if _groups:
        raise InputError(
            "Without Horovod, a process can be initialized only once. Received: hvd.init() after hvd.shutdown(). Start "
            "a new process."
        )
    try:
        engine = TensorFlowEngine(options)
        _groups.append(engine.group)
        return engine
    except RuntimeError as error:
        if "program startup" not in str(error):
            raise
        raise InputError(f"hvd.init() must come before any other use of TensorFlow. Received: {error}.") from error


def horovod_is_installed() -> bool:
    """Returns whether Horovod is installed; raises an error if it is installed but cannot be imported."""
    try:
        importlib.import_module("horovod")
    except ModuleNotFoundError as error:
        if error.name != "horovod":
            raise
        return False
    return True


@functools.cache
def _leave_at_exit() -> None:
    atexit.register(_leave_groups)


def _leave_groups() -> None:
    """Leaves the group at exit. After an error, the process does not wait for other ranks."""
    code, reason = goodbye_of(getattr(sys, "last_value", None))
    with contextlib.suppress(TfdistError):  # the lost rank reports the error
        if is_planned(code):
            shutdown()
    for group in _groups:
        group.leave(code, reason)


def shutdown() -> None:
    """Closes the engine; with Horovod, `init` may follow."""
    if _engines:
        _engines.pop().close()


def is_initialized() -> bool:
    """Returns whether the engine is running: after `init` and before `shutdown`."""
    return bool(_engines)


def engine() -> Engine:
    """Returns the engine in use; raises `InputError` before `init`."""
    if not _engines:
        raise InputError("hvd.init() must be called first. Received: a call before that, or after hvd.shutdown().")
    return _engines[0]


def rank() -> int:
    """Returns the index of this process, in [0, size)."""
    return engine().rank


def size() -> int:
    """Returns the number of processes."""
    return engine().size


def local_rank() -> int:
    """Returns the index of this process on its host."""
    return engine().local_rank


def local_size() -> int:
    """Returns the number of processes on this host."""
    return engine().local_size


def cross_rank() -> int:
    """Returns the index of this host among the hosts with this local rank."""
    return engine().cross_rank


def cross_size() -> int:
    """Returns the number of hosts with this local rank."""
    return engine().cross_size


def is_homogeneous() -> bool:
    """Returns whether every host has the same number of processes."""
    return engine().is_homogeneous


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Starts writing Horovod's timeline."""
    _horovod_function("start_timeline", "Use the profiler, --profile_steps of tfdist train")(
        file_path, mark_cycles=mark_cycles
    )


def stop_timeline() -> None:
    """Stops writing Horovod's timeline."""
    _horovod_function("stop_timeline", "Use the profiler, --profile_steps of tfdist train")()


def add_process_set(process_set: Any) -> Any:
    """Adds a set of ranks after `init`, with HOROVOD_DYNAMIC_PROCESS_SETS=1; every rank must call it."""
    return _horovod_function("add_process_set", "Remove process_set")(process_set)


def remove_process_set(process_set: Any) -> bool:
    """Removes a set of ranks; every rank must call it. Returns whether the set existed."""
    return _horovod_function("remove_process_set", "Remove process_set")(process_set)


def _horovod_function(name: str, alternative: str) -> Any:
    if not horovod_is_installed():
        raise horovod_required_error(f"hvd.{name}()", alternative)
    return getattr(importlib.import_module("horovod.tensorflow"), name)


def _build_query(name: str) -> Any:
    def query() -> bool:
        if not horovod_is_installed():
            return False
        return getattr(importlib.import_module("horovod.tensorflow"), name)()

    query.__name__ = query.__qualname__ = name
    query.__doc__ = f"Horovod's `{name}`; False without Horovod."
    return query


mpi_enabled, mpi_built = _build_query("mpi_enabled"), _build_query("mpi_built")
gloo_enabled, gloo_built = _build_query("gloo_enabled"), _build_query("gloo_built")
nccl_built, ddl_built, ccl_built = _build_query("nccl_built"), _build_query("ddl_built"), _build_query("ccl_built")
cuda_built, rocm_built = _build_query("cuda_built"), _build_query("rocm_built")


def mpi_threads_supported() -> bool:
    """Returns whether MPI supports several threads; False without MPI, for which Horovod raises an error."""
    return bool(mpi_enabled()) and bool(_build_query("mpi_threads_supported")())


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Returns whether TensorFlow has a GPU; the arguments are Horovod's, and have no effect."""
    return bool(tf.config.list_physical_devices("GPU"))


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Raises `ImportError` if an extension of Horovod was not built, and `InputError` without Horovod."""
    if not horovod_is_installed():
        raise horovod_required_error(f"hvd.check_extension({ext_name!r}, ...)", "Remove the call")
    importlib.import_module("horovod.common.util").check_extension(ext_name, ext_env_var, pkg_path, *args)
