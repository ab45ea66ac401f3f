"""Horovod over MPI: which library it was built with, and a start of that library over the group, without mpirun."""

import ctypes
import functools
import os
import pathlib
from collections.abc import Sequence

import horovod.tensorflow as hvd
from horovod.common.util import get_ext_suffix

from tfdist.coordination import Group
from tfdist.coordination.addresses import LOOPBACK, network_interface
from tfdist.coordination.mpi_pmi import serving
from tfdist.errors import InputError

_LONGEST_NAME = 8192  # bytes; MPI_MAX_LIBRARY_VERSION_STRING is not larger in any library
_THREAD_MULTIPLE = 3  # in the ABI of MPICH, and in Open MPI
# Variables of UCX and libfabric, through which MPICH connects hosts. They listen even if all ranks share a host's memory.
_INTERFACES = ("UCX_NET_DEVICES", "FI_TCP_IFACE", "FI_SOCKETS_IFACE")


def library() -> str:
    """Returns the MPI library that Horovod was built with, such as "MPICH 4.3.2"; empty if there is none."""
    if not hvd.mpi_built():
        return ""
    text, length = ctypes.create_string_buffer(_LONGEST_NAME), ctypes.c_int()
    _functions().MPI_Get_library_version(text, ctypes.byref(length))  # permitted before MPI is initialized
    return library_name(text.value.decode(errors="replace"))


def library_name(version: str) -> str:
    """Returns name and version from a library's description of itself, whose first line may say more, as Open MPI's does."""
    first = version.partition("\n")[0].partition(",")[0]
    return " ".join(first.replace("Version:", " ").replace("Open MPI v", "Open MPI ").split())


def starts_without_mpirun(name: str) -> bool:
    """Returns whether `initialize` can start a library, by its name; Open MPI has another interface for it."""
    return not name.startswith("Open MPI")


def is_initialized() -> bool:
    """Returns whether MPI is initialized in this process."""
    found = ctypes.c_int()
    _functions().MPI_Initialized(ctypes.byref(found))
    return bool(found.value)


def initialize(group: Group, hosts: Sequence[str], seconds: float) -> None:
    """Initializes MPI in this process, once, for any number of starts of Horovod.

    Horovod ends MPI only if it has initialized it. Here MPI ends with the process: it cannot be initialized again, and
    ending it would wait for ranks that are lost.

    Args:
      group: the job's group. All members must call this function.
      hosts: address of each rank's host, by rank.
      seconds: how long to wait for another rank.

    Raises:
      InputError: Horovod was not built with MPI, or with a library that only mpirun can start.
    """
    _check_library()
    if is_initialized():
        return
    if all(host == LOOPBACK for host in hosts):
        interface = network_interface(LOOPBACK)
        for variable in _INTERFACES:
            os.environ.setdefault(variable, interface)
    with serving(group, hosts, seconds):  # from another thread: ctypes does not hold the interpreter's lock
        _functions().MPI_Init_thread(None, None, _THREAD_MULTIPLE, ctypes.byref(ctypes.c_int()))


def _check_library() -> None:
    name = library()
    if not name:
        raise InputError(
            "--communication=mpi needs a Horovod that was built with MPI. Received: one without. Run `pip install mpich` "
            "and `tfdist install_horovod --mpi`."
        )
    if not starts_without_mpirun(name):
        raise InputError(
            f"Only mpirun can start processes of Open MPI. Received: Horovod with {name}. Run the command with `mpirun -np N`, "
            "or build Horovod with MPICH: `pip install mpich` and `tfdist install_horovod --mpi --force`."
        )


@functools.cache
def _functions() -> ctypes.CDLL:
    """Returns the library that Horovod was linked with, whichever it is: its symbols are found through Horovod's."""
    return ctypes.CDLL(str(pathlib.Path(hvd.__file__).with_name(f"mpi_lib{get_ext_suffix()}")))
