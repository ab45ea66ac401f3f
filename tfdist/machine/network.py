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
    is_loopback,
    user_token,
)
from tfdist.errors import InputError
from tfdist.machine.report import Finding, Section, Status

_SECONDS = 5.0  # for a message over the loopback
_INTERFACE = "HOROVOD_GLOO_IFACE"


def section(environment: Mapping[str, str]) -> Section:
    """Returns the state of the network; engines on one host need a loopback that can be bound."""
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
        _name_finding(name, addresses),
        loopback,
        *(Finding(Status.OK, _describe_interface(each)) for each in interfaces),
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
            with socket.create_connection(server.getsockname(), _SECONDS) as client_end:
                server_end, _ = server.accept()
                with server_end:
                    server_end.settimeout(_SECONDS)
                    client_end.sendall(b"?")
                    return "" if server_end.recv(1) == b"?" else "a message was lost"
    except OSError as error:
        return os.strerror(error.errno) if error.errno else str(error)


def _resolved(name: str) -> list[str]:
    with contextlib.suppress(OSError):
        infos = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(each[4][0]) for each in infos))
    return []


def _name_finding(name: str, addresses: list[str]) -> Finding:
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
            "addresses": [each.address for each in addresses if each.family in (socket.AF_INET, socket.AF_INET6)],
        }
        for name, addresses in sorted(psutil.net_if_addrs().items())
    ]


def _describe_interface(interface: Mapping[str, object]) -> str:
    addresses = interface["addresses"]
    assert isinstance(addresses, list)
    return f"{interface['name']} is {'up' if interface['is_up'] else 'down'}: {', '.join(addresses) or 'no address'}"


def _token(environment: Mapping[str, str]) -> Finding:
    try:
        token = user_token(environment)
    except InputError as error:
        return Finding(Status.WARNING, str(error))
    insecure = " (insecure ones are allowed)" if environment.get(INSECURE_VARIABLE) else ""
    if not token:
        return Finding(Status.OK, f"no token, which only jobs over several hosts need{insecure}")
    if len(token) >= MIN_TOKEN_LENGTH:
        return Finding(Status.OK, "a token for jobs over several hosts")
    problem = f"the token has {len(token)} characters; jobs over several hosts need {MIN_TOKEN_LENGTH}"
    remedy = "Make a longer one: python -c 'import secrets; print(secrets.token_hex(32))'"
    return Finding(Status.WARNING, problem, remedy)
