"""MPI's process management interface: how the processes of an MPI library find each other, over the group of their job.

An MPI library requests its rank and the addresses of the others from the program that started it, usually mpirun. Here each
process answers its own library, through a pair of sockets that no other process can reach, and the group distributes the
published values: this needs neither another port nor a manager process, and the job's token protects it.

The protocol is version 1 of PMI (Balaji et al., PMI: A Scalable Parallel Process-Management Interface, EuroMPI 2010),
which MPICH and the libraries derived from it use, such as Intel MPI. Open MPI does not.
"""

import contextlib
import itertools
import logging
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tfdist.cluster.quiet_tensorflow import environment_variables
from tfdist.coordination.group import Group
from tfdist.errors import TfdistError

_log = logging.getLogger("tfdist.coordination")
_KEY_SPACE = "kvs_0"  # name of the only space of keys and values
_MAXIMA = "kvsname_max=256 keylen_max=64 vallen_max=1024"
_VARIABLES = ("PMI_FD", "PMI_RANK", "PMI_SIZE")


class _Reply(NamedTuple):
    """A reply to a command.

    Attributes:
      text: its line, without the end of the line.
      is_last: whether it ends the conversation.
    """

    text: str
    is_last: bool = False


@contextlib.contextmanager
def serving(group: Group, hosts: Sequence[str], seconds: float) -> Iterator[None]:
    """Context in which an MPI library can be started in this process, once; it is served until it ends.

    Collective: all members must start their libraries. The variables are restored at the end of the context, because
    child processes are not members of the MPI job.

    Args:
      group: the job's group.
      hosts: host of each member, by rank.
      seconds: how long the library may wait for another member.
    """
    service_end, library_end = socket.socketpair()
    service = _Service(group, hosts, seconds)
    threading.Thread(target=service.serve, args=(service_end,), name="mpi process management", daemon=True).start()
    values = (str(library_end.detach()), str(group.rank), str(group.size))  # the library closes its end
    with environment_variables(dict(zip(_VARIABLES, values, strict=True))):  # srun may have set some
        yield


class _Service:
    """Answers the library of one member."""

    def __init__(self, group: Group, hosts: Sequence[str], seconds: float):
        self._group, self._seconds = group, seconds
        self._values = {"PMI_process_mapping": process_mapping(hosts)}
        self._unsent: dict[str, str] = {}  # values since the last barrier
        self._barriers = itertools.count()

    def serve(self, sock: socket.socket) -> None:
        """Answers until the library ends, or the other end is closed."""
        with sock, contextlib.suppress(OSError), sock.makefile("r", encoding="latin-1", newline="\n") as lines:
            for line in lines:
                reply = self._answer(dict(word.partition("=")[::2] for word in line.split()))
                sock.sendall(f"{reply.text}\n".encode("latin-1"))
                if reply.is_last:
                    return

    def _answer(self, command: dict[str, str]) -> _Reply:
        match command.get("cmd", ""):
            case "init":
                return _Reply("cmd=response_to_init rc=0 pmi_version=1 pmi_subversion=1")
            case "get_maxes":
                return _Reply(f"cmd=maxes rc=0 {_MAXIMA}")
            case "get_appnum":
                return _Reply("cmd=appnum rc=0 appnum=0")
            case "get_universe_size":
                return _Reply(f"cmd=universe_size rc=0 size={self._group.size}")
            case "get_my_kvsname":
                return _Reply(f"cmd=my_kvsname rc=0 kvsname={_KEY_SPACE}")
            case "put":
                self._values[command["key"]] = self._unsent[command["key"]] = command["value"]
                return _Reply("cmd=put_result rc=0 msg=success")
            case "get":
                value = self._values.get(command["key"])
                result = (
                    f"rc=0 msg=success value={value}" if value is not None else "rc=-1 msg=key_not_found value=unknown"
                )
                return _Reply(f"cmd=get_result {result}")
            case "barrier_in":
                return self._barrier()
            case "finalize" | "abort":
                return _Reply("cmd=finalize_ack rc=0", is_last=True)
            case name:
                return _Reply(f"cmd={name} rc=-1 msg=unsupported")

    def _barrier(self) -> _Reply:
        """Waits for all members, and receives their values."""
        sent, self._unsent = self._unsent, {}
        try:
            for values in self._group.gather(f"mpi/{next(self._barriers)}", sent, self._seconds):
                self._values.update(values)
        except TfdistError as error:  # the library ends the process
            _log.error("MPI cannot start: %s", error)
            return _Reply("cmd=barrier_out rc=-1 msg=failed")
        return _Reply("cmd=barrier_out rc=0 msg=success")


def process_mapping(hosts: Sequence[str]) -> str:
    """Returns PMI's description of which ranks share a host: blocks of (first host, number of hosts, ranks on each).

    Args:
      hosts: host of each member, by rank.
    """
    numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    blocks = [f"({numbers[host]},1,{len(list(ranks))})" for host, ranks in itertools.groupby(hosts)]
    return f"(vector,{','.join(blocks)})"
