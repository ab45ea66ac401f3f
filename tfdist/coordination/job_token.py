"""The token of a job: a secret of its processes, which keeps everybody else out of its control plane.

Jobs on one host need no set-up: they use a key that belongs to the user who runs them. A job over several hosts needs a token
that the user provides.
"""

import contextlib
import hashlib
import logging
import os
import pathlib
import pwd
import secrets
import stat
from collections.abc import Mapping

from tfdist.coordination.addresses import is_loopback, split_address
from tfdist.coordination.authentication import derived
from tfdist.errors import InputError

TOKEN_VARIABLE = "TFDIST_TOKEN"
FILE_VARIABLE = "TFDIST_TOKEN_FILE"
INSECURE_VARIABLE = "TFDIST_INSECURE"

SHORTEST = 16  # characters of a token that is used over a network
_LONGEST = 4096  # bytes of a token file
_MAKE = "(umask 077; python -c 'import secrets; print(secrets.token_hex(32))' > ~/tfdist_token)"

_log = logging.getLogger("tfdist")


def job_token(environment: Mapping[str, str], address: str, described: str = "", *, warns: bool = True) -> str:
    """Returns the token of a job.

    It is TFDIST_TOKEN, or else the contents of TFDIST_TOKEN_FILE. Without these, a job whose address is on the loopback uses a
    token that only processes of the same user on this host can derive; any other job is refused, unless TFDIST_INSECURE allows
    a token that can be derived from its addresses, and hence separates jobs without protecting them.

    Args:
      environment: where the variables are looked up.
      address: `host:port` at which the job's control plane is served.
      described: what distinguishes this job from others at the address, the same in all of its processes.
      warns: whether to log a warning if the job is not protected.

    Raises:
      InputError: there is no token for a job over several hosts, it is too short, or its file cannot be used.
    """
    is_local = _is_local(address)
    token = given_token(environment)
    if token and not is_local and len(token) < SHORTEST:
        raise InputError(
            f"The token of a job over several hosts must have at least {SHORTEST} characters, because it can be guessed "
            f"otherwise. Received: {len(token)}. Make one: {_MAKE}"
        )
    if token:
        return token
    described = f"{address}\n{described}"
    allowed = environment.get(INSECURE_VARIABLE, "").strip().lower() in ("1", "true", "yes", "on")
    if is_local:
        return _hashed(described) if allowed else derived(_user_key(environment), described)
    if not allowed:
        raise InputError(
            f"A job over several hosts needs a secret token; without one, anyone who can reach {address} can join it. "
            f"Received: neither {TOKEN_VARIABLE} nor {FILE_VARIABLE} nor --token_file. Make one in a file that all hosts can "
            f"read, {_MAKE}, and set {FILE_VARIABLE}=~/tfdist_token for every process; or set {INSECURE_VARIABLE}=1 or "
            "--insecure on a network that you trust."
        )
    if warns:
        _log.warning("This job has no token (%s): anyone who can reach %s can join it.", INSECURE_VARIABLE, address)
    return _hashed(described)


def bound(token: str, role: str, address: str) -> str:
    """Returns the token with which one group is served, as jobs and groups may have the same token.

    It depends on the port but not on the host, which members may know by different names.

    Args:
      token: the job's token.
      role: what the members are.
      address: `host:port` at which this process serves the group, or reaches it.
    """
    return derived(token, f"{role} at port {split_address(address)[1]}")


def with_flags(environment: Mapping[str, str], token_file: str, insecure: bool) -> dict[str, str]:
    """Returns the environment with the variables that --token_file and --insecure stand for, if they were given."""
    variables = {FILE_VARIABLE: token_file, INSECURE_VARIABLE: "1" if insecure else ""}
    return {**environment, **{name: value for name, value in variables.items() if value}}


def given_token(environment: Mapping[str, str]) -> str:
    """Returns the token that the user provides: TFDIST_TOKEN, or else the contents of TFDIST_TOKEN_FILE; empty without either.

    Whitespace at its beginning and its end does not belong to it.

    Raises:
      InputError: the file cannot be read, is empty, or can be read or written by other users.
    """
    token = environment.get(TOKEN_VARIABLE, "").strip()
    if token or not environment.get(FILE_VARIABLE):
        return token
    path = _token_file(environment[FILE_VARIABLE])
    try:
        token = _private_text(path)
    except _NotPrivateError as error:
        raise InputError(
            f"The token file must be a regular file of yours that no one else may read or write. Received: {path}, {error}. "
            f"Run: chmod 600 {path}"
        ) from error
    except OSError as error:
        raise InputError(
            f"The token file must be readable. Received: {path} ({error.strerror}). Make it: {_MAKE}"
        ) from error
    if not token:
        raise InputError(f"The token file must not be empty. Received: {path}. Make it: {_MAKE}")
    return token


def _token_file(given: str) -> pathlib.Path:
    try:
        return pathlib.Path(given).expanduser()
    except RuntimeError as error:  # there is no such user, or no home
        raise InputError(
            f"The token file must be in a home directory that exists on this host. Received: {given} ({error}) in "
            f"{FILE_VARIABLE} or --token_file. Give the whole path."
        ) from error


class _NotPrivateError(Exception):
    """A file is not a regular one of this user, or others may use it; the message has its owner and its mode."""


def _private_text(path: pathlib.Path) -> str:
    """Returns the text of a file that belongs to this user alone; raises `_NotPrivateError` for another one."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:  # a FIFO would block
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise _NotPrivateError(f"of user {status.st_uid}, mode {stat.S_IMODE(status.st_mode):04o}")
        return file.read(_LONGEST).decode("utf-8", "surrogateescape").strip()


def _user_key(environment: Mapping[str, str]) -> str:
    """Returns a key that only this user can read on this host, which is created at its first use.

    Raises:
      InputError: it cannot be created, or others can read it.
    """
    cache = environment.get("XDG_CACHE_HOME") or os.path.join(_home(environment), ".cache")
    path = pathlib.Path(cache) / "tfdist" / "token"
    try:
        if not path.exists():
            _create(path)
        if key := _private_text(path):
            return key
        reason = "an empty file"
    except _NotPrivateError as error:
        reason = str(error)
    except OSError as error:
        reason = error.strerror or str(error)
    raise InputError(
        f"The processes of a job on one host need a key that only their user can read. Received: {path} ({reason}). Remove it, "
        f"or make its directory writable, set XDG_CACHE_HOME to another one, or set {TOKEN_VARIABLE} for every process."
    )


def _home(environment: Mapping[str, str]) -> str:
    try:
        return environment.get("HOME") or pwd.getpwuid(os.geteuid()).pw_dir
    except KeyError as error:  # as in a container that is run by any user
        raise InputError(
            f"The processes of a job on one host need a key in their user's home. Received: user {os.geteuid()}, who has none. "
            f"Set HOME, XDG_CACHE_HOME, or {TOKEN_VARIABLE} for every process."
        ) from error


def _create(path: pathlib.Path) -> None:
    """Creates a key, unless another process creates it at the same time; it is complete as soon as it exists."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _is_local(address: str) -> bool:
    host = split_address(address)[0]
    try:
        return host == "localhost" or is_loopback(host)
    except ValueError:  # another name, which may belong to the loopback on this host only
        return False


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
