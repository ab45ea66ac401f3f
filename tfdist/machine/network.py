"""The network of this host: its name, the loopback, its interfaces, and the token of jobs over several hosts."""

import contextlib
import os
import socket
from collections.abc import Mapping

import psutil

from tfdist.coordination.job_token import (
    FILE_VARIABLE,
    INSECURE_VARIABLE,
    LOOPBACK,
    MIN_TOKEN_LENGTH,
    TOKEN_VARIABLE,
    user_token,
    is_loopback,
)
from tfdist.errors import InputError
from tfdist.machine.report import Finding, Section, Status, one_of

_SECONDS = 5.0  # for a message over the loopback
_INTERFACE = "HOROVOD_GLOO_IFACE"


def section(environment: Mapping[str, str]) -> Section:
    """Returns what the network has; engines on one host need a loopback that can be bound."""
    name = socket.gethostname()
    addresses = _resolved(name)
    problem = loopback_problem()
    interfaces = _interfaces()
    token = _token(environment)
    facts = {
        "host_name": name,
        "addresses": addresses,
        "loopback_problem": problem or None,
        "interfaces": interfaces,
        "token_source": next((each for each in (TOKEN_VARIABLE, FILE_VARIABLE) if environment.get(each)), None),
        "token_problem": token.text if token.status == Status.WARNING else None,
    }
    loopback = Finding(Status.OK, f"ports of {LOOPBACK} can be bound and reached")
    if problem:
        remedy = "ip link set lo up, and permit connections over it in the firewall"
        loopback = Finding(Status.FAILED, f"{LOOPBACK} cannot be used: {problem}", remedy)
    chosen = environment.get(_INTERFACE, "")
    unknown = bool(chosen) and chosen not in [each["name"] for each in interfaces]
    findings = [
        _of_name(name, addresses),
        loopback,
        *(Finding(Status.OK, _described(each)) for each in interfaces),
        token,
    ]
    if unknown:
        text = f"{_INTERFACE} names {chosen}, an interface which this host does not have"
        findings.append(Finding(Status.WARNING, text, f"unset {_INTERFACE}"))
    return Section("network", facts, findings)


def loopback_problem() -> str:
    """Returns why a message cannot be sent over a new port of the loopback; empty if it can."""
    try:
        with socket.create_server((LOOPBACK, 0)) as server:
            server.settimeout(_SECONDS)
            with socket.create_connection(server.getsockname(), _SECONDS) as ours:
                theirs, _ = server.accept()
                with theirs:
                    theirs.settimeout(_SECONDS)
                    ours.sendall(b"?")
                    return "" if theirs.recv(1) == b"?" else "a message was lost"
    except OSError as error:
        return os.strerror(error.errno) if error.errno else str(error)


def _resolved(name: str) -> list[str]:
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(each[4][0]) for each in found))
    return []


def _of_name(name: str, addresses: list[str]) -> Finding:
    if not addresses:
        return Finding(
            Status.WARNING,
            f"the host name {name} cannot be resolved, which jobs over several hosts need",
            f"Add a line with this host's address and {name} to /etc/hosts.",
        )
    text = f"the host name {name} is {', '.join(addresses)}"
    if all(map(is_loopback, addresses)):
        text += ", which other hosts cannot reach: use an address of an interface in --coordinator"
    return Finding(Status.OK, text)


def _interfaces() -> list[dict[str, object]]:
    states = psutil.net_if_stats()
    return [
        {
            "name": name,
            "is_up": name in states and states[name].isup,
            "addresses": [one.address for one in held if one.family in (socket.AF_INET, socket.AF_INET6)],
        }
        for name, held in sorted(psutil.net_if_addrs().items())
    ]


def _described(interface: Mapping[str, object]) -> str:
    addresses = interface["addresses"]
    assert isinstance(addresses, list)
    return f"{interface['name']} is {'up' if interface['is_up'] else 'down'}: {', '.join(addresses) or 'no address'}"


def _token(environment: Mapping[str, str]) -> Finding:
    try:
        token = user_token(environment)
    except InputError as error:
        return Finding(Status.WARNING, str(error))
    short = (
        f"the token has {len(token)} characters; jobs over several hosts need {MIN_TOKEN_LENGTH}"
        if 0 < len(token) < MIN_TOKEN_LENGTH
        else ""
    )
    insecure = " (insecure ones are allowed)" if environment.get(INSECURE_VARIABLE) else ""
    otherwise = (
        "a token for jobs over several hosts"
        if token
        else f"no token, which only jobs over several hosts need{insecure}"
    )
    return one_of(short, "Make a longer one: python -c 'import secrets; print(secrets.token_hex(32))'", otherwise)
