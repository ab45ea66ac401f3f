"""Initialization, shutdown, and Horovod's queries for ranks and build options.

As in Horovod, the engine in use is the only global state: the functions have no handle to it.
"""

import atexit
import contextlib
import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.cluster import exit_status
from tfdist.coordination import Group
from tfdist.coordination.client import goodbye_of, is_planned
from tfdist.errors import InputError, TfdistError
from tfdist.horovod.engine import Engine, needs_horovod

_engines: list[Engine] = []  # the engine in use, if any
# The job's group: joined once per process, even if the engine then fails, and left at exit.
_groups: list[Group] = []
_at_start: list[Callable[[], None]] = []

exit_status.watch()  # before the program's `sys.exit(main())` is evaluated, in which `init` is called


def init(comm: Any = None, process_sets: Sequence[Any] | str | None = None) -> None:
    """Starts the engine: Horovod or, if it is not installed, tf.distribute's collectives. Call it before anything else.

    The processes are those of `tfdist launch` (either launcher), horovodrun, mpirun or srun; otherwise there is only
    this one. Further calls do nothing.

    Args:
      comm: Horovod's: ranks of the job, or an MPI communicator.
      process_sets: Horovod's: sets that exist from the start, or "dynamic".

    Raises:
      InputError: the environment is invalid, or an argument needs Horovod.
      PeerLostError: a process did not join in time.
    """
    if _engines:
        return
    options: dict[str, Any] = {} if comm is None else {"comm": comm}
    options |= {} if process_sets is None else {"process_sets": process_sets}
    try:
        _engines.append(_started(options))
    finally:
        _end_with_the_process()
    for call in _at_start:
        call()


def _started(options: dict[str, Any]) -> Engine:
    if horovod_is_installed():
        from tfdist.horovod.horovod_engine import HorovodEngine

        return HorovodEngine(_groups[0] if _groups else None, joined=_groups.append, **options)
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
    """Returns whether Horovod is installed; raises if it is but cannot be loaded."""
    try:
        importlib.import_module("horovod")
    except ModuleNotFoundError as error:
        if error.name != "horovod":
            raise
        return False
    return True


@functools.cache
def _end_with_the_process() -> None:
    atexit.register(_say_goodbye)


def _say_goodbye() -> None:
    """Leaves the group at the end of the process, with its exit code; a failure does not wait for the other ranks."""
    code, reason = goodbye_of(exit_status.cause())
    with contextlib.suppress(TfdistError):  # a lost rank has reported that itself
        if is_planned(code):
            shutdown()
    for group in _groups:
        group.leave(code, reason)


def at_start(call: Callable[[], None]) -> None:
    """Registers a call to be made by `init`, for modules that import this one."""
    _at_start.append(call)


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
        raise InputError("hvd.init() must be called first. Received: a call before it, or after hvd.shutdown().")
    return _engines[0]


def rank() -> int:
    """Returns this process's index, from 0 to `size` - 1."""
    return engine().rank


def size() -> int:
    """Returns the number of processes."""
    return engine().size


def local_rank() -> int:
    """Returns this process's index among those of its host."""
    return engine().local_rank


def local_size() -> int:
    """Returns the number of processes on this host."""
    return engine().local_size


def cross_rank() -> int:
    """Returns the index of this host among those with a process of this local rank."""
    return engine().cross_rank


def cross_size() -> int:
    """Returns the number of hosts with a process of this local rank."""
    return engine().cross_size


def is_homogeneous() -> bool:
    """Returns whether every host has the same number of processes."""
    return engine().is_homogeneous


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Starts writing Horovod's timeline."""
    _of_horovod("start_timeline", "Use the profiler, --profile_steps of tfdist train")(
        file_path, mark_cycles=mark_cycles
    )


def stop_timeline() -> None:
    """Stops writing Horovod's timeline."""
    _of_horovod("stop_timeline", "Use the profiler, --profile_steps of tfdist train")()


def add_process_set(process_set: Any) -> Any:
    """Adds a set of ranks after `init`, with HOROVOD_DYNAMIC_PROCESS_SETS=1; every rank must call it."""
    return _of_horovod("add_process_set", "Leave out process_set")(process_set)


def remove_process_set(process_set: Any) -> bool:
    """Removes a set of ranks; every rank must call it. Returns whether the set existed."""
    return _of_horovod("remove_process_set", "Leave out process_set")(process_set)


def _of_horovod(name: str, instead: str) -> Any:
    if not horovod_is_installed():
        raise needs_horovod(f"hvd.{name}()", instead)
    return getattr(importlib.import_module("horovod.tensorflow"), name)


def _built(name: str) -> Any:
    """Returns a query for a build option of Horovod, which is False without Horovod."""

    def answer() -> bool:
        if not horovod_is_installed():
            return False
        return getattr(importlib.import_module("horovod.tensorflow"), name)()

    answer.__name__ = answer.__qualname__ = name
    answer.__doc__ = f"Horovod's `{name}`; False without Horovod."
    return answer


mpi_enabled, mpi_built = _built("mpi_enabled"), _built("mpi_built")
gloo_enabled, gloo_built = _built("gloo_enabled"), _built("gloo_built")
nccl_built, ddl_built, ccl_built = _built("nccl_built"), _built("ddl_built"), _built("ccl_built")
cuda_built, rocm_built = _built("cuda_built"), _built("rocm_built")


def mpi_threads_supported() -> bool:
    """Returns whether MPI may be used from several threads; False without MPI, where Horovod's own raises."""
    return bool(mpi_enabled()) and bool(_built("mpi_threads_supported")())


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Returns whether TensorFlow has a GPU.

    Args:
      ext_base_name: Horovod's "tensorflow".
      verbose: accepted, but has no effect.
    """
    return bool(tf.config.list_physical_devices("GPU"))


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Raises `ImportError` if an extension of Horovod was not built, and `InputError` without Horovod."""
    if not horovod_is_installed():
        raise needs_horovod(f"hvd.check_extension({ext_name!r}, ...)", "Leave it out")
    importlib.import_module("horovod.common.util").check_extension(ext_name, ext_env_var, pkg_path, *args)
