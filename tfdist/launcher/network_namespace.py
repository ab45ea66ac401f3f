"""A network namespace for a job on one host (Linux), in which no other program can reach its ports."""

import ctypes
import fcntl
import os
import pathlib
import socket
import struct

from tfdist.errors import InputError

_NEW_USER, _NEW_NET = 0x10000000, 0x40000000  # CLONE_NEWUSER, CLONE_NEWNET of <linux/sched.h>
_GET_FLAGS, _SET_FLAGS = 0x8913, 0x8914  # SIOCGIFFLAGS, SIOCSIFFLAGS of <linux/sockios.h>
_UP = 0x1  # IFF_UP of <linux/if.h>
_REQUEST = "16sh22x"  # struct ifreq: name and flags of an interface


def enter() -> None:
    """Moves this process, and its future child processes, into a new network namespace with only a loopback.

    Users other than root need a user namespace for this, in which they keep their ids. The process must have a single thread.

    Raises:
      InputError: the system does not permit it.
    """
    user, group = os.geteuid(), os.getegid()
    try:
        _unshare(_NEW_NET if user == 0 else _NEW_NET | _NEW_USER)
        if user:
            _keep_ids(user, group)
        _start_loopback()
    except (OSError, AttributeError) as error:  # libc has no `unshare` outside Linux
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"--isolate needs a network namespace, which this system does not permit. Received: {reason}. Run it as root, "
            "allow user namespaces, or leave it out and close the ports of the job to others."
        ) from error


def _unshare(namespaces: int) -> None:
    if ctypes.CDLL(None, use_errno=True).unshare(namespaces):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _keep_ids(user: int, group: int) -> None:
    """Maps the user and the group to themselves; otherwise files would belong to `nobody`."""
    own = pathlib.Path("/proc/self")
    (own / "setgroups").write_text("deny")  # required before a group can be mapped without privileges
    (own / "uid_map").write_text(f"{user} {user} 1")
    (own / "gid_map").write_text(f"{group} {group} 1")


def _start_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket, _GET_FLAGS, struct.pack(_REQUEST, b"lo", 0))
        flags = struct.unpack(_REQUEST, answer)[1]
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack(_REQUEST, b"lo", flags | _UP))
