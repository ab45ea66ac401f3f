"""Initializes Horovod: chooses its communication library and connects the ranks, with or without horovodrun.

MPI libraries connect through PMI-1, a line protocol on a socket, which `pmi_service` implements over the job's group.
"""

import contextlib
import ctypes
import dataclasses
import functools
import itertools
import logging
import os
import pathlib
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod.common.util import get_ext_suffix
from horovod.runner.common.util.hosts import HostInfo, get_host_assignments
from horovod.runner.gloo_run import create_slot_env_vars

from tfdist.cluster.affinity import cores_per_process, cpu_quota
from tfdist.cluster.devices import BINDING_LAUNCHERS
from tfdist.cluster.environment import Cluster
from tfdist.cluster.quiet_tensorflow import temporary_environment_variables
from tfdist.collectives.no_constant_folding import hide_constant
from tfdist.coordination import Group, horovod_store
from tfdist.coordination.job_token import (
    LOOPBACK,
    free_port,
    is_loopback,
    join_address,
    network_interface,
    route_to,
    split_address,
)
from tfdist.coordination.join import ADDRESS_VARIABLE, ELASTIC_VARIABLE
from tfdist.errors import InputError, TfdistError

_log = logging.getLogger(__name__)
# Replies to commands without arguments.
_REPLIES = {
    "init": "cmd=response_to_init rc=0 pmi_version=1 pmi_subversion=1",
    "get_maxes": "cmd=maxes rc=0 kvsname_max=256 keylen_max=64 vallen_max=1024",
    "get_appnum": "cmd=appnum rc=0 appnum=0",
    "get_my_kvsname": "cmd=my_kvsname rc=0 kvsname=kvs_0",
    "finalize": "cmd=finalize_ack rc=0",
    "abort": "cmd=finalize_ack rc=0",
}


@contextlib.contextmanager
def pmi_service(group: Group, hosts: Sequence[str], seconds: float) -> Iterator[None]:
    """Context in which an MPI library can be initialized once; a thread answers its PMI commands until the process ends.

    All members of the group must start their libraries. On exit, environment variables are restored, because child processes
    are not members of the MPI job.
    """
    service_end, library_end = socket.socketpair()
    service = _Service(group, hosts, seconds)
    threading.Thread(target=service.serve, args=(service_end,), name="mpi process management", daemon=True).start()
    end = str(library_end.detach())  # the library closes it
    variables = {"PMI_FD": end, "PMI_RANK": str(group.rank), "PMI_SIZE": str(group.size)}
    with temporary_environment_variables(variables):  # srun may have set some
        yield


class _Service:
    def __init__(self, group: Group, hosts: Sequence[str], seconds: float):
        self._group, self._seconds = group, seconds
        self._values = {"PMI_process_mapping": process_mapping(hosts)}
        self._new_values: dict[str, str] = {}  # values since the last barrier
        self._barriers = itertools.count()

    def serve(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError), sock.makefile("r", encoding="latin-1", newline="\n") as lines:
            for line in lines:
                command = dict(word.partition("=")[::2] for word in line.split())
                sock.sendall(f"{self._answer(command)}\n".encode("latin-1"))
                if command.get("cmd") in ("finalize", "abort"):
                    return

    def _answer(self, command: dict[str, str]) -> str:
        match command.get("cmd", ""):
            case "get_universe_size":
                return f"cmd=universe_size rc=0 size={self._group.size}"
            case "put":
                self._values[command["key"]] = self._new_values[command["key"]] = command["value"]
                return "cmd=put_result rc=0 msg=success"
            case "get" if command.get("key") in self._values:
                return f"cmd=get_result rc=0 msg=success value={self._values[command['key']]}"
            case "get":
                return "cmd=get_result rc=-1 msg=key_not_found value=unknown"
            case "barrier_in":
                return self._barrier()
            case name:
                return _REPLIES.get(name, f"cmd={name} rc=-1 msg=unsupported")

    def _barrier(self) -> str:
        new_values, self._new_values = self._new_values, {}
        try:
            for values in self._group.gather(f"mpi/{next(self._barriers)}", new_values, self._seconds):
                self._values.update(values)
        except TfdistError as error:  # the library ends the process
            _log.error("MPI cannot start: %s", error)
            return "cmd=barrier_out rc=-1 msg=failed"
        return "cmd=barrier_out rc=0 msg=success"


def process_mapping(hosts: Sequence[str]) -> str:
    """Returns PMI's description of the hosts of all ranks, in blocks (first host, number of hosts, ranks per host)."""
    host_indices = {host: index for index, host in enumerate(dict.fromkeys(hosts))}
    blocks = [f"({host_indices[host]},1,{len(list(ranks))})" for host, ranks in itertools.groupby(hosts)]
    return f"(vector,{','.join(blocks)})"


_MAX_NAME_BYTES = 8192  # bytes; MPI_MAX_LIBRARY_VERSION_STRING is not larger in any library
_THREAD_MULTIPLE = 3  # in the ABI of MPICH, and in Open MPI
# Variables of UCX and libfabric, with which MPICH connects hosts. They open ports even if all ranks share a host's memory.
_INTERFACE_VARIABLES = ("UCX_NET_DEVICES", "FI_TCP_IFACE", "FI_SOCKETS_IFACE")


def mpi_library() -> str:
    """Returns the MPI library that Horovod was built with, such as "MPICH 4.3.2"; empty if there is none."""
    if not hvd.mpi_built():
        return ""
    text, length = ctypes.create_string_buffer(_MAX_NAME_BYTES), ctypes.c_int()
    _mpi_library().MPI_Get_library_version(text, ctypes.byref(length))  # permitted before MPI is initialized
    return library_name(text.value.decode(errors="replace"))


def library_name(version: str) -> str:
    """Returns the name and version number of an MPI library, given its description of itself."""
    name = version.partition("\n")[0].partition(",")[0]
    return " ".join(name.replace("Version:", " ").replace("Open MPI v", "Open MPI ").split())


def starts_without_mpirun(name: str) -> bool:
    """Returns whether `initialize_mpi` can start the library with this name, which is false for Open MPI."""
    return not name.startswith("Open MPI")


def initialize_mpi(group: Group, hosts: Sequence[str], seconds: float) -> None:
    """Initializes MPI once in this process, however often Horovod is started.

    MPI then ends with the process, not with Horovod: it cannot be initialized again, and ending it would wait for lost ranks.
    All members must call this function, with the address of each rank's host, and wait up to `seconds` for each other.

    Raises:
      InputError: Horovod was not built with MPI, or with a library that only mpirun can start.
    """
    if not (name := mpi_library()):
        raise InputError(
            "--communication=mpi requires Horovod built with MPI. Received: Horovod without MPI. Run "
            "`pip install mpich` and `tfdist install_horovod --mpi`."
        )
    if not starts_without_mpirun(name):
        raise InputError(
            f"Open MPI needs processes started by mpirun. Received: Horovod with {name}. Run the command with `mpirun -np N`, "
            "or build Horovod with MPICH: `pip install mpich` and `tfdist install_horovod --mpi --force`."
        )
    flag = ctypes.c_int()
    _mpi_library().MPI_Initialized(ctypes.byref(flag))
    if flag.value:
        return
    if all(host == LOOPBACK for host in hosts):
        interface = network_interface(LOOPBACK)
        for variable in _INTERFACE_VARIABLES:
            os.environ.setdefault(variable, interface)
    with pmi_service(group, hosts, seconds):  # from another thread: ctypes does not hold the interpreter's lock
        _mpi_library().MPI_Init_thread(None, None, _THREAD_MULTIPLE, ctypes.byref(ctypes.c_int()))


@functools.cache
def _mpi_library() -> ctypes.CDLL:
    return ctypes.CDLL(str(pathlib.Path(hvd.__file__).with_name(f"mpi_lib{get_ext_suffix()}")))


# For `--communication=auto`, Horovod's collectives use MPI if each rank has a core for it, else Gloo. Between processes of one
# host, MPI has a fraction of Gloo's latency, but waits by polling, which keeps a core busy. The decision is the same
# in every run of a command on a machine, and does not depend on load or measurements, because libraries sum in different orders
# and a process cannot replace the library with which it has started Horovod.

ELASTIC_VARIABLES = (ELASTIC_VARIABLE, "HOROVOD_ELASTIC")  # of `launch` and of horovodrun
CORES = 2  # cores per rank that MPI needs: one polls while the other computes
# Variables with which users choose the library.
_HOROVOD_VARIABLES = ("HOROVOD_CPU_OPERATIONS", "HOROVOD_CONTROLLER")


class LibraryChoice(NamedTuple):
    """A library, "gloo" or "mpi", and the reason for it, a clause that begins with "because" or "as"."""

    library: str
    reason: str


def choose_library(group: Group, cluster: Cluster) -> LibraryChoice:
    """Chooses the library for all members: Gloo if any member has a reason against MPI. Every member must call it."""
    cores = cores_per_process(cluster.local_size, assigned=cluster.source in BINDING_LAUNCHERS)
    quota = cpu_quota() / cluster.local_size
    has_gpus = bool(tf.config.list_physical_devices("GPU"))
    local_choice = rank_choice(cluster, min(cores, quota), mpi_library(), has_gpus, os.environ)
    choices = [LibraryChoice(*choice) for choice in group.gather("horovod/automatic", list(local_choice))]
    return next((choice for choice in choices if choice.library == "gloo"), local_choice)


def rank_choice(cluster: Cluster, cores: float, mpi: str, has_gpus: bool, env: Mapping[str, str]) -> LibraryChoice:
    """Returns the choice of one rank, which may use this number of cores; `mpi` is the name of Horovod's MPI library."""
    reasons_against_mpi = (
        (cluster.size == 1, "this is a single process"),
        (any(env.get(name) == "1" for name in ELASTIC_VARIABLES), "the job is elastic"),
        ("HOROVOD_RANK" in env and ADDRESS_VARIABLE not in env, "horovodrun started the processes"),
        (has_gpus, "the ranks have GPUs"),
        (cluster.local_size < cluster.size, "the job is on several hosts"),
        (cores < CORES, f"MPI needs {CORES} cores per rank, of which it keeps one busy, and there are {cores:g}"),
        (not mpi, "Horovod was built without MPI"),
        (not starts_without_mpirun(mpi), f"only mpirun can start {mpi}"),
    )
    for applies, reason in reasons_against_mpi:
        if applies:
            return LibraryChoice("gloo", f"because {reason}")
    return LibraryChoice("mpi", f"because all ranks are on one host, with {cores:g} cores each")


COMMUNICATION_VARIABLE = "TFDIST_COMMUNICATION"  # "gloo" or "mpi", used if there is no flag
STALL_CHECK, STALL_SHUTDOWN = "HOROVOD_STALL_CHECK_TIME_SECONDS", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
STALL_SECONDS = 600
_MAX_ADDRESS_BYTES = 512  # bytes of a host name and port, with room to spare
_library_in_use: dict[str, str] = {}  # "communication": the library; "reason": why it was chosen
# Horovod's cycle time in ms; half of it is added to every message. With Gloo, which sleeps while it waits, 0.1 would keep a
# third of a core busy. MPI polls while ranks wait for each other in every cycle: with 0.5, a step of a small model takes 1.1 to
# 1.4 times as long as with 2 if each rank has one core.
_CYCLE_MS = {"gloo": "0.5", "mpi": "2"}


def start_horovod(
    cluster: Cluster,
    join: Callable[[Cluster], Group],
    *,
    communication: str = "",
    stall_seconds: int = STALL_SECONDS,
    make_process_sets: Callable[[Group | None], list[hvd.ProcessSet]] | None = None,
    **options: Any,
) -> Group:
    """Initializes Horovod in this process, with tfdist's settings unless the environment overrides them.

    Args:
      cluster: this process in the job.
      join: joins the job's group; called once, when the group's address is known.
      communication: library of the collectives, "gloo" or "mpi". "auto" uses the library set in the environment, else that of
        `choose_library`; an empty string the library set in the environment, else Gloo.
      stall_seconds: seconds after which Horovod aborts an operation that a rank does not submit.
      make_process_sets: returns the process sets, which Horovod must know when it starts. Called once, with the group, or None
        if the group is joined through Horovod. By default, the process sets in `options` are used.
      **options: arguments of Horovod's `init`, including `process_sets`.

    Returns:
      The job's group.
    """
    _set_defaults(stall_seconds)
    _check_mpirun(cluster)
    communication, _library_in_use["reason"] = _requested_choice(communication, cluster)
    has_rank = "HOROVOD_RANK" in os.environ or cluster.source == "MPI"
    if has_rank and not _knows_coordinator(cluster):
        if make_process_sets:
            options["process_sets"] = make_process_sets(None)
        _init(options, communication)
        _check_size(cluster, options)
        return join(_broadcast_coordinator(cluster))
    # The group is joined first: it waits for slow ranks as long as configured, whereas Gloo aborts after 30 s.
    group = join(cluster)
    if group.size == cluster.size:
        group.agree("horovod/communication", {"communication": communication}, "--")
    if communication == "auto":
        communication, _library_in_use["reason"] = choose_library(group, cluster)
    if make_process_sets:
        options["process_sets"] = make_process_sets(group)
    if has_rank and (communication == "gloo" or cluster.source == "MPI"):
        _init(options, communication)
        _check_size(cluster, options)
    else:
        start_with_group(group, cluster, communication, **options)
    return group


def automatic_choice(group: Group, cluster: Cluster) -> LibraryChoice:
    """Returns the choice for "auto" without starting Horovod; all members must call this function."""
    choice = _requested_choice("auto", cluster)
    return choose_library(group, cluster) if choice.library == "auto" else choice


def _check_mpirun(cluster: Cluster) -> None:
    """Raises `InputError` in processes of Open MPI's mpirun if Horovod uses MPICH, which would abort them."""
    library = mpi_library() if cluster.source == "MPI" and "OMPI_COMM_WORLD_RANK" in os.environ else ""
    if library.startswith(("MPICH", "Intel")):
        raise _mpirun_error(f"Open MPI's, and Horovod with {library}")


def _check_size(cluster: Cluster, options: Mapping[str, Any]) -> None:
    """Raises `InputError` if Horovod's library did not find the processes that mpirun has started."""
    if cluster.source == "MPI" and "comm" not in options and hvd.size() != cluster.size:
        library = mpi_library() or "a Horovod without MPI"
        hvd.shutdown()
        raise _mpirun_error(f"{cluster.size} processes, of which {library} finds only this one")


def _mpirun_error(received: str) -> InputError:
    return InputError(
        f"mpirun must belong to the MPI library with which Horovod was built. Received: {received}. Use that library's mpirun, "
        "or set MPI_HOME to the directory of this one and run `tfdist install_horovod --mpi --force`."
    )


def _knows_coordinator(cluster: Cluster) -> bool:
    return bool(cluster.coordinator or ADDRESS_VARIABLE in os.environ)


def _requested_choice(communication: str, cluster: Cluster) -> LibraryChoice:
    """Returns the requested library and the reason; the library is "auto" if `choose_library` must choose."""
    if cluster.source == "MPI":
        if communication == "gloo":
            raise InputError(
                "--communication=gloo is for processes that mpirun has not started. Received: mpirun's variables. Remove the "
                "flag, or use `tfdist launch`."
            )
        return LibraryChoice("mpi", "because mpirun started the processes")
    if communication in ("gloo", "mpi"):
        choice, origin = LibraryChoice(communication, "as --communication says"), "--communication"
    else:
        choice, origin = _environment_choice(communication), COMMUNICATION_VARIABLE
    if choice.library == "mpi" and "HOROVOD_RANK" in os.environ and not _knows_coordinator(cluster):
        raise InputError(
            f"{origin}=mpi is for jobs whose processes know where rank 0 is before Horovod starts. Received: a job of "
            "horovodrun. Use `tfdist launch` or `horovodrun --mpi`, or set TFDIST_COORDINATOR=host:port."
        )
    return choice


def _environment_choice(communication: str) -> LibraryChoice:
    """Returns the choice for "auto", or for a program that does not choose a library."""
    library = os.environ.get(COMMUNICATION_VARIABLE)
    if library and library not in ("gloo", "mpi"):
        raise InputError(
            f"{COMMUNICATION_VARIABLE} must be gloo or mpi. Received: {library}. Unset it, or use one of them."
        )
    if library:
        return LibraryChoice(library, f"as {COMMUNICATION_VARIABLE} says")
    if communication == "auto":
        # Horovod's launcher also sets these variables, which are then not the user's choice.
        for name in _HOROVOD_VARIABLES if "HOROVOD_RANK" not in os.environ else ():
            if (library := os.environ.get(name, "").lower()) in ("gloo", "mpi"):
                return LibraryChoice(library, f"as {name} says")
        return LibraryChoice("auto", "because horovodrun started the processes")
    return LibraryChoice(_library_in_use.get("communication", "gloo"), "because the program does not choose a library")


def describe_communication() -> str:
    """Returns a sentence with Horovod's library and the reason for it; call this function after `start_horovod`."""
    library = mpi_library() if hvd.mpi_enabled() else "Gloo"
    if hvd.nccl_built() and tf.config.list_physical_devices("GPU"):
        library = f"NCCL and {library}"
    return f"Horovod uses {library}, {_library_in_use['reason']}."


def start_elastic(**options: Any) -> None:
    """Initializes Horovod in a process of an elastic horovodrun job, for the first time or after a reset.

    The ranks must not communicate in any other way here, because surviving and new processes must make the same calls, whatever
    the number of ranks was when they started.
    """
    _set_defaults(STALL_SECONDS)
    if _environment_choice("").library != "gloo":
        _log.warning("Elastic jobs of horovodrun use Gloo. %s=mpi has no effect.", COMMUNICATION_VARIABLE)
    _init(options)


def start_with_group(group: Group, cluster: Cluster, communication: str = "", **options: Any) -> None:
    """Initializes Horovod, for the first time or again.

    The group exchanges the addresses of MPI. For Gloo, rank 0 starts a new rendezvous each time and broadcasts its address,
    because Gloo would crash on the stale addresses of an earlier rendezvous.
    """
    if cluster.source == "MPI":
        raise InputError(
            "Under mpirun, a process can start Horovod only once, because its shutdown ends MPI. Received: a second call. "
            "Keep Horovod running, or use `tfdist launch`."
        )
    communication = _requested_choice(communication, cluster).library
    if communication != _library_in_use.setdefault("communication", communication):
        raise InputError(
            f"Horovod keeps the library with which a process first starts it. Received: {communication} after "
            f"{_library_in_use['communication']}. Use the same library, or another process."
        )
    if communication == "mpi":
        if group.size != cluster.size:
            raise InputError(
                f"hvd.init(comm=...) over MPI needs mpirun. Received: {cluster.source}'s variables. Replace comm by "
                "process_sets."
            )
        initialize_mpi(group, _host_addresses(cluster, group), STALL_SECONDS)
        with temporary_environment_variables({"HOROVOD_CONTROLLER": "mpi", "HOROVOD_CPU_OPERATIONS": "mpi"}):
            _init(options, communication)
    else:
        os.environ.update(serve_and_describe(cluster, group))
        _init(options, communication)


def _init(options: dict[str, Any], communication: str = "gloo") -> None:
    """Initializes Horovod; shuts it down after an error, so that it can be started again."""
    os.environ.setdefault("HOROVOD_CYCLE_TIME", _CYCLE_MS.get(communication, _CYCLE_MS["gloo"]))
    try:
        hvd.init(**options)
    except BaseException:
        hvd.shutdown()
        raise


def _set_defaults(stall_seconds: int) -> None:
    # Horovod fuses tensors by arrival, which changes the order of summation between runs; tfdist's buckets are fixed.
    for name, value in {"HOROVOD_FUSION_THRESHOLD": "0", **stall_settings(os.environ, stall_seconds)}.items():
        os.environ.setdefault(name, value)


def stall_settings(environment: Mapping[str, str], max_seconds: int = STALL_SECONDS) -> dict[str, str]:
    """Returns Horovod's settings for stalled operations: seconds until a warning and until a shutdown.

    The defaults are 60 and `max_seconds`. Shutdown must be later than the warning: if the user sets one, the other is adjusted.
    """
    shutdown_seconds = int(environment.get(STALL_SHUTDOWN) or 0) or max_seconds  # 0 means never in Horovod
    check = int(environment.get(STALL_CHECK) or max(1, min(60, shutdown_seconds // 2)))
    shutdown = environment.get(STALL_SHUTDOWN) or str(max(max_seconds, 2 * check))
    return {STALL_CHECK: str(check), STALL_SHUTDOWN: shutdown}


def _broadcast_coordinator(cluster: Cluster) -> Cluster:
    """Broadcasts an address for the group, with a port that rank 0 chooses, through the initialized Horovod.

    Uses a session because programs may disable eager execution, or configure TensorFlow's devices after `hvd.init`.
    """
    if cluster.size == 1:
        return cluster
    host = LOOPBACK if cluster.local_size == cluster.size else socket.gethostname()
    address = np.frombuffer(join_address(host, free_port()).encode().ljust(_MAX_ADDRESS_BYTES, b"\0"), np.uint8)
    cpu_config = tf.compat.v1.ConfigProto(device_count={"GPU": 0})
    with tf.Graph().as_default(), tf.compat.v1.Session(config=cpu_config) as session:
        data = session.run(hvd.broadcast(hide_constant(tf.constant(address)), 0, name="group_address")).tobytes()
    return dataclasses.replace(cluster, coordinator=data.rstrip(b"\0").decode())


def serve_and_describe(cluster: Cluster, group: Group) -> dict[str, str]:
    """Starts the rendezvous on rank 0 and returns the environment for this process's `hvd.init`.

    As in Horovod, the ranks of a host must be consecutive.
    """
    hosts = _host_addresses(cluster, group)
    infos = [HostInfo(name, hosts.count(name)) for name in dict.fromkeys(hosts)]
    slots = get_host_assignments(infos, len(hosts), len(hosts))
    served_port = horovod_store.serve(hosts[0], slots).server_port if cluster.rank == 0 else None
    port = group.broadcast("horovod/port", served_port)
    variables = horovod_store.gloo_variables(hosts[0], port, lambda: network_interface(hosts[cluster.rank]))
    return variables | create_slot_env_vars(slots[cluster.rank])


def _host_addresses(cluster: Cluster, group: Group) -> list[str]:
    """Returns the address of each rank's host, for the other ranks.

    Host names of containers are not unique, and a host's own name often resolves to its loopback address. A rank that reaches
    rank 0 through the loopback is on rank 0's host, whose address the other hosts know.
    """
    if cluster.local_size == cluster.size:
        return [LOOPBACK] * cluster.size
    # The launcher knows rank 0 by this address.
    launcher_address = os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR") or socket.gethostname()
    address = group.broadcast("horovod/at", cluster.coordinator or join_address(launcher_address, 1))
    try:
        route = route_to(*split_address(address), socket.AF_INET)
    except OSError as error:
        raise InputError(
            f"Horovod's rendezvous needs an IPv4 address of rank 0's host. Received: {address} ({error}). Set "
            "TFDIST_COORDINATOR=host:port to such an address, the same for every process."
        ) from error
    routes = group.gather("horovod/ways", list(route))
    first_host = next(
        (remote_address for local_address, remote_address in routes if not is_loopback(local_address)), LOOPBACK
    )
    return [first_host if is_loopback(local_address) else local_address for local_address, _ in routes]
