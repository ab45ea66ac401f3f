"""Who this process is: starting, ending, and Horovod's questions about ranks and about what was built.

The engine in use is the one thing that is global here, as in Horovod: its functions have no handle of it.
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
from tfdist.errors import InputError, TfdistError
from tfdist.horovod.engine import Engine, needs_horovod

_engines: list[Engine] = []  # the one in use, or none
_groups: list[Group] = []  # the job's, joined once a process, also when the engine then fails, and left when it ends
_at_start: list[Callable[[], None]] = []


def init(comm: Any = None, process_sets: Sequence[Any] | str | None = None) -> None:
    """Starts the engine: Horovod, or where it is not installed tf.distribute's collectives; call it before all else.

    The processes are those of `tfdist.launch` (either launcher), horovodrun, mpirun or srun; else this one is alone.
    Called again, it does nothing.

    Args:
      comm: Horovod's: ranks of the job, or an MPI communicator.
      process_sets: Horovod's: sets that exist from the start, or "dynamic".

    Raises:
      InputError: the environment is wrong, or an argument needs Horovod.
      PeerLostError: a process did not come.
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
            "Without Horovod a process initializes once. Received: hvd.init() after hvd.shutdown(). Start a new process."
        )
    try:
        engine = TensorFlowEngine(options)
        _groups.append(engine.group)
        return engine
    except RuntimeError as error:
        if "program startup" not in str(error):
            raise
        raise InputError(f"hvd.init() comes before anything else of TensorFlow. Received: {error}.") from error


def horovod_is_installed() -> bool:
    """Whether there is a Horovod; one that is there and does not load is an error, never passed over."""
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
    """At the process's end: the others learn whether it went well."""
    failed = getattr(sys, "last_value", None) is not None
    with contextlib.suppress(TfdistError):  # a rank that is gone has said so itself
        if not failed:
            shutdown()
    for group in _groups:
        group.leave(int(failed))


def at_start(call: Callable[[], None]) -> None:
    """Lets `init` make a call; for modules that ask this one for the engine."""
    _at_start.append(call)


def shutdown() -> None:
    """Ends the engine; `init` may follow with Horovod."""
    if _engines:
        _engines.pop().close()


def is_initialized() -> bool:
    """Whether `init` was called, and `shutdown` was not."""
    return bool(_engines)


def engine() -> Engine:
    """The engine in use; raises `InputError` before `init`."""
    if not _engines:
        raise InputError("hvd.init() must be called first. Received: a call before it, or after hvd.shutdown().")
    return _engines[0]


def rank() -> int:
    """This process's number, from 0 to `size` - 1."""
    return engine().rank


def size() -> int:
    """The number of processes."""
    return engine().size


def local_rank() -> int:
    """This process's number among those of its host."""
    return engine().local_rank


def local_size() -> int:
    """The number of processes on this host."""
    return engine().local_size


def cross_rank() -> int:
    """The number of this host among those that have a process of this local rank."""
    return engine().cross_rank


def cross_size() -> int:
    """The number of hosts that have a process of this local rank."""
    return engine().cross_size


def is_homogeneous() -> bool:
    """Whether every host has the same number of processes."""
    return engine().is_homogeneous


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Starts to write Horovod's timeline."""
    _of_horovod("start_timeline", "Use the profiler, --profile_steps of tfdist.train")(
        file_path, mark_cycles=mark_cycles
    )


def stop_timeline() -> None:
    """Ends Horovod's timeline."""
    _of_horovod("stop_timeline", "Use the profiler, --profile_steps of tfdist.train")()


def add_process_set(process_set: Any) -> Any:
    """Adds a set of ranks after `init`, with HOROVOD_DYNAMIC_PROCESS_SETS=1; every rank calls it."""
    return _of_horovod("add_process_set", "Leave out process_set")(process_set)


def remove_process_set(process_set: Any) -> bool:
    """Removes a set of ranks; every rank calls it. Returns whether it was there."""
    return _of_horovod("remove_process_set", "Leave out process_set")(process_set)


def _of_horovod(name: str, instead: str) -> Any:
    if not horovod_is_installed():
        raise needs_horovod(f"hvd.{name}()", instead)
    return getattr(importlib.import_module("horovod.tensorflow"), name)


def _built(name: str) -> Any:
    """A question about Horovod's build; the answer is False where there is no Horovod."""

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
    """Whether MPI may be used from several threads; False without MPI, where Horovod's own raises."""
    return bool(mpi_enabled()) and bool(_built("mpi_threads_supported")())


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether TensorFlow has a GPU.

    Args:
      ext_base_name: Horovod's "tensorflow".
      verbose: taken, and without effect.
    """
    return bool(tf.config.list_physical_devices("GPU"))


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Raises `ImportError` if an extension of Horovod's was not built, and `InputError` where there is no Horovod."""
    if not horovod_is_installed():
        raise needs_horovod(f"hvd.check_extension({ext_name!r}, ...)", "Leave it out")
    importlib.import_module("horovod.common.util").check_extension(ext_name, ext_env_var, pkg_path, *args)
