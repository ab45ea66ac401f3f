"""The token of a job, which protects its control plane, and the addresses of groups.

Jobs on one host need no set-up: they use a key in the user's home directory. Jobs on several hosts need a token.
"""

import contextlib
import errno
import hashlib
import ipaddress
import logging
import os
import pathlib
import secrets
import socket
import stat
from collections.abc import Mapping
from typing import NamedTuple

import psutil

from tfdist.coordination.messages import derive_token
from tfdist.errors import InputError

LOOPBACK = "127.0.0.1"


def split_address(address: str) -> tuple[str, int]:
    """Splits `host:port` into the host, without the brackets of an IPv6 address, and the port."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    """Returns `host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def free_port() -> int:
    """Returns an unused port of this host; another program may take it before it is used."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def listen(address: str, remedy: str) -> socket.socket:
    """Opens the listening socket of a group.

    Binds only the interface of `address`, if this host has it. All interfaces are bound if the name resolves to the loopback
    (Debian writes such entries into /etc/hosts) or to an address that this host does not have (behind a NAT router).

    Args:
      address: `host:port`; port 0 chooses a free port.
      remedy: last sentence of the error message.

    Raises:
      InputError: the port is in use, or the name cannot be resolved.
    """
    host, port = split_address(address)
    try:
        try:
            return _bind(_interface(host), port)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            return _bind("", port)
    except OSError as error:
        problem = "port in use" if error.errno == errno.EADDRINUSE else error.strerror or error
        raise InputError(f"The group must be served at {address}. Received: {problem}. {remedy}") from error


class Route(NamedTuple):
    """The addresses of this host and of another one on the route between them."""

    local_address: str
    remote_address: str


def route_to(host: str, port: int = 1, family: int = socket.AF_UNSPEC) -> Route:
    """Finds the route to a host, without sending anything.

    Args:
      host: host name or IP address.
      port: any port.
      family: `socket.AF_INET` for an engine that supports IPv4 only.

    Raises:
      OSError: the name cannot be resolved, or there is no route.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, family, socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return Route(str(probe.getsockname()[0]), str(probe.getpeername()[0]))


def is_loopback(address: str) -> bool:
    """Returns whether an address is a loopback address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def network_interface(address: str) -> str:
    """Returns the name of this host's network interface with an address, or "" if there is none."""
    pairs = ((name, info.address) for name, infos in psutil.net_if_addrs().items() for info in infos)
    return next((name for name, other in pairs if other.partition("%")[0] == address.partition("%")[0]), "")


def _interface(host: str) -> str:
    address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    return "" if is_loopback(address) and host not in (address, "localhost") else address


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=512)


TOKEN_VARIABLE = "TFDIST_TOKEN"
FILE_VARIABLE = "TFDIST_TOKEN_FILE"
INSECURE_VARIABLE = "TFDIST_INSECURE"

MIN_TOKEN_LENGTH = 16  # characters of a token that is used over a network
_MAX_FILE_BYTES = 4096  # bytes of a token file
_CREATE_COMMAND = "(umask 077; python -c 'import secrets; print(secrets.token_hex(32))' > ~/tfdist_token)"

_log = logging.getLogger("tfdist")


def job_token(environment: Mapping[str, str], address: str, description: str = "", *, warns: bool = True) -> str:
    """Returns the token of a job.

    The token is TFDIST_TOKEN or the contents of TFDIST_TOKEN_FILE. Without these, a job whose address is on the loopback uses
    a token that only processes of the same user on this host can derive. Any other job raises an error, unless
    TFDIST_INSECURE allows a token that is derived from its addresses, which separates jobs without protecting them.

    Args:
      environment: environment variables.
      address: `host:port` at which the job's control plane is served.
      description: string that distinguishes this job from others at the same address; the same in all processes of the job.
      warns: whether to log a warning if the job is not protected.

    Raises:
      InputError: there is no token for a job on several hosts, the token is too short, or its file cannot be used.
    """
    is_local = _is_local(address)
    token = user_token(environment)
    if token and not is_local and len(token) < MIN_TOKEN_LENGTH:
        raise InputError(
            f"The token of a job on several hosts must have at least {MIN_TOKEN_LENGTH} characters, because a shorter one "
            f"can be guessed. Received: {len(token)}. Create a token: {_CREATE_COMMAND}"
        )
    if token:
        return token
    description = f"{address}\n{description}"
    allows_insecure = environment.get(INSECURE_VARIABLE, "").strip().lower() in ("1", "true", "yes", "on")
    if is_local:
        return _hash(description) if allows_insecure else derive_token(_user_key(environment), description)
    if not allows_insecure:
        raise InputError(
            f"A job on several hosts needs a secret token; without one, anyone who can reach {address} can join it. "
            f"Received: neither {TOKEN_VARIABLE} nor {FILE_VARIABLE} nor --token_file. Create one in a file that all hosts can "
            f"read, {_CREATE_COMMAND}, and set {FILE_VARIABLE}=~/tfdist_token for every process; or set "
            f"{INSECURE_VARIABLE}=1 or --insecure on a network that you trust."
        )
    if warns:
        _log.warning("This job has no token (%s): anyone who can reach %s can join it.", INSECURE_VARIABLE, address)
    return _hash(description)


def group_token(token: str, role: str, address: str) -> str:
    """Derives the token of one group from a token that several jobs and groups may share.

    The token depends on the port, but not on the host, because members may use different names for it.

    Args:
      token: the job's token.
      role: noun for the members.
      address: `host:port` at which this process serves or reaches the group.
    """
    return derive_token(token, f"{role} at port {split_address(address)[1]}")


def add_token_flags(environment: Mapping[str, str], token_file: str, insecure: bool) -> dict[str, str]:
    """Returns the environment with variables for --token_file and --insecure, if they are set."""
    variables = {FILE_VARIABLE: token_file, INSECURE_VARIABLE: "1" if insecure else ""}
    return {**environment, **{name: value for name, value in variables.items() if value}}


def user_token(environment: Mapping[str, str]) -> str:
    """Returns the user's token: TFDIST_TOKEN or the contents of TFDIST_TOKEN_FILE; empty if neither is set.

    Surrounding whitespace is ignored.

    Raises:
      InputError: the file cannot be read, is empty, or can be read or written by other users.
    """
    token = environment.get(TOKEN_VARIABLE, "").strip()
    if token or not environment.get(FILE_VARIABLE):
        return token
    path = os.path.expanduser(environment[FILE_VARIABLE])
    try:
        token = _private_text(path)
    except PermissionError as error:
        raise InputError(
            "The token file must be a regular file that you own and that no one else may read or write. Received: "
            f"{path}, {error.strerror}. Run: chmod 600 {path}"
        ) from error
    except OSError as error:
        raise InputError(
            f"The token file must be readable. Received: {path} ({error.strerror}). Create it: {_CREATE_COMMAND}"
        ) from error
    if not token:
        raise InputError(f"The token file must not be empty. Received: {path}. Create it: {_CREATE_COMMAND}")
    return token


def _private_text(path: str | pathlib.Path) -> str:
    """Returns the contents of a file; raises `PermissionError` unless it is a regular file for this user only."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:  # a FIFO would block
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise PermissionError(errno.EACCES, f"owner {status.st_uid}, mode {stat.S_IMODE(status.st_mode):04o}")
        return file.read(_MAX_FILE_BYTES).decode("utf-8", "surrogateescape").strip()


def _user_key(environment: Mapping[str, str]) -> str:
    """Returns a key that only this user can read on this host; creates it if it does not exist."""
    cache = environment.get("XDG_CACHE_HOME") or os.path.join(environment.get("HOME") or "~", ".cache")
    path = pathlib.Path(cache) / "tfdist" / "token"
    try:
        path = path.expanduser()
        if not path.exists():
            _create_key(path)
        if key := _private_text(path):
            return key
        reason = "an empty file"
    except (OSError, RuntimeError) as error:  # there may be no home directory, as in a container with an arbitrary user
        reason = getattr(error, "strerror", None) or str(error)
    raise InputError(
        f"The processes of a job on one host need a key that only their user can read. Received: {path} ({reason}). Remove "
        f"the file, make its directory writable, set XDG_CACHE_HOME to another one, or set {TOKEN_VARIABLE} for every process."
    )


def _create_key(path: pathlib.Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial_path = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    try:
        with open(os.open(partial_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(partial_path, path)
    finally:
        partial_path.unlink(missing_ok=True)


def _is_local(address: str) -> bool:
    host = split_address(address)[0]
    try:
        return host == "localhost" or is_loopback(host)
    except ValueError:  # a name, which may resolve to the loopback on this host only
        return False


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
