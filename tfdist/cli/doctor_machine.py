"""Defines findings of `tfdist doctor`, and reports the versions, hardware, limits, variables and network of this machine."""

import contextlib
import enum
import importlib.metadata
import math
import os
import pathlib
import platform
import re
import resource
import shutil
import socket
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import psutil
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import tfdist
from tfdist.cli.horovod_build import PATCHED_VERSION
from tfdist.cluster.affinity import cpu_quota
from tfdist.cluster.environment import describe, detect_cluster, multi_process_hint
from tfdist.coordination.job_token import INSECURE_VARIABLE, LOOPBACK, MIN_TOKEN_LENGTH, is_loopback, user_token
from tfdist.errors import InputError, byte_size, truncate
from tfdist.reporting.environment import versions


class Status(enum.StrEnum):
    """The status of a finding."""

    OK = "ok"
    WARNING = "warning"  # works, but may fail later or elsewhere
    MISSING = "missing"  # not installed, or not available on this machine
    FAILED = "failed"  # required but not installed, or does not work


class Finding(NamedTuple):
    """A line of the report."""

    status: Status  # status of the component or limit
    text: str  # one line
    remedy: str = ""  # a command or instruction that fixes a problem; may be empty

    def lines(self) -> list[str]:
        """Returns the lines of the report."""
        return [f"  {self.status:<8} {self.text}", *([f"           -> {self.remedy}"] if self.remedy else [])]


def warning_or_ok(problem: str, remedy: str, otherwise: str) -> Finding:
    """Returns a warning if there is a problem, else an OK."""
    return Finding(Status.WARNING, problem, remedy) if problem else Finding(Status.OK, otherwise)


_PACKAGES = {"tensorflow": "TensorFlow", "keras": "Keras", "numpy": "NumPy"}
_HOROVOD, _INSTALL = "horovod", "tfdist install_horovod"


def versions_section() -> list[Finding]:
    """Returns the versions, with warnings about unsupported ones."""
    installed_versions = versions()
    pattern = re.compile(r"Programming Language :: Python :: (\d+\.\d+)")
    pythons = [match[1] for match in map(pattern.fullmatch, _metadata_field("Classifier")) if match]
    python = installed_versions["python"]
    is_supported = not pythons or python.rpartition(".")[0] in pythons
    # The requirements of extras come last.
    requirements = map(Requirement, reversed(_metadata_field("Requires-Dist")))
    specifiers = {requirement.name: requirement.specifier for requirement in requirements}
    findings = [
        Finding(Status.OK, f"tfdist {tfdist.__version__}, {platform.platform()}"),
        _version_finding("Python", python, is_supported, ", ".join(pythons), "Use a supported version."),
    ]
    for name, title in _PACKAGES.items():
        version, specifier = installed_versions.get(name), specifiers.get(name, SpecifierSet())
        remedy = f"pip install '{name}{str(specifier).replace(' ', '')}'"
        if version is None:
            findings.append(Finding(Status.FAILED, f"{title} is not installed, and tfdist requires it", remedy))
        else:
            is_supported = specifier.contains(version, prereleases=True)
            findings.append(_version_finding(title, version, is_supported, str(specifier), remedy))
    if version := installed_versions.get(_HOROVOD):
        findings.append(_version_finding("Horovod", version, version == PATCHED_VERSION, PATCHED_VERSION, _INSTALL))
    else:
        findings.append(Finding(Status.MISSING, "Horovod is not installed", _INSTALL))
    return findings


def _version_finding(title: str, version: str, is_supported: bool, supported: str, remedy: str) -> Finding:
    if not is_supported:
        return Finding(Status.WARNING, f"{title} {version} is not supported; supported: {supported}", remedy)
    return Finding(Status.OK, f"{title} {version}" + (f" (supported: {supported})" if supported else ""))


def _metadata_field(field: str) -> list[str]:
    try:
        return importlib.metadata.metadata("tfdist").get_all(field) or []
    except importlib.metadata.PackageNotFoundError:
        return []


_MEMORY_LIMIT = pathlib.Path("/sys/fs/cgroup/memory.max")  # cgroup v2
_SHARED_MEMORY = "/dev/shm"
_MIN_FREE_MEMORY = 2 << 30  # a TensorFlow process needs 0.5 GiB even before a model is created
_MIN_FREE_SHARED_MEMORY = 128 << 20  # containers have 64 MiB by default
_MIN_FREE_DISK = 1 << 30


def hardware_section() -> list[Finding]:
    """Returns the resources of this machine, and the limits of this process."""
    usable_cores, quota = len(os.sched_getaffinity(0)), cpu_quota()
    memory, limit = psutil.virtual_memory(), container_limit(_MEMORY_LIMIT)
    free = min(memory.available, limit or memory.available)
    cores = f"{os.cpu_count()} cores, of which this process may use {usable_cores}"
    cores += f", with a CPU quota of {quota:g} cores" if math.isfinite(quota) else ""
    memory_text = f"{byte_size(memory.total)} of memory, {byte_size(memory.available)} free"
    memory_text += f"; the container may use {byte_size(limit)}" if limit else ""
    return [
        Finding(Status.OK, cores),
        warning_or_ok(
            f"only {byte_size(free)} of memory is free; a TensorFlow process needs 0.5 GiB even before a model is created"
            if free < _MIN_FREE_MEMORY
            else "",
            "Stop other programs, or raise the container's limit.",
            memory_text,
        ),
        _space_finding(
            _SHARED_MEMORY, _MIN_FREE_SHARED_MEMORY, "Free up space there, or start the container with --shm-size=1g."
        ),
        _space_finding(os.getcwd(), _MIN_FREE_DISK, "Free up space there, or pass an --output_dir elsewhere."),
    ]


def _space_finding(path: str, minimum: int, remedy: str) -> Finding:
    if not os.access(path, os.W_OK):
        return Finding(Status.WARNING, f"{path} is not writable", f"Give this user write permission for {path}.")
    free = shutil.disk_usage(path).free
    problem = f"only {byte_size(free)} is free in {path}" if free < minimum else ""
    return warning_or_ok(problem, remedy, f"{byte_size(free)} free in {path}")


_PROCESS_LIMIT = pathlib.Path("/sys/fs/cgroup/pids.max")
_MIN_FILES = 1024
_MIN_PROCESSES = 1024  # including threads; a TensorFlow process has dozens


def limits_section() -> list[Finding]:
    """Returns the limits, with warnings about low ones."""
    limits = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC))
    files, processes = (math.inf if limit == resource.RLIM_INFINITY else limit for limit in limits)
    processes = min(processes, container_limit(_PROCESS_LIMIT) or math.inf)
    remedy = "ulimit -u 16384, or raise the container's limit (docker run --pids-limit)"
    return [
        _limit_finding(files, _MIN_FILES, "files may be open", "ulimit -n 65536", "open files"),
        _limit_finding(processes, _MIN_PROCESSES, "processes and threads are allowed", remedy, "processes and threads"),
    ]


def _limit_finding(limit: float, minimum: int, problem: str, remedy: str, noun: str) -> Finding:
    text = f"{limit if math.isfinite(limit) else 'unlimited'} {noun}"
    return warning_or_ok(f"only {limit} {problem}" if limit < minimum else "", remedy, text)


def container_limit(path: pathlib.Path) -> int | None:
    """Reads a limit of this process's container from a cgroup v2 file; None if unlimited or unknown."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # "max" instead of a number, or no cgroup v2
        return None


_RELEVANT_VARIABLES = re.compile(
    r"_?(TFDIST|TF(?!_(CLI|VAR)_)|HOROVOD|KERAS|TFDS|XLA|DTENSOR|CUDA|NCCL|GRPC|GLOO|UCX|FI|OMPI|PMI|PMIX|MPI|MPICH|HYDRA|I_MPI|SLURM|OMP|KMP"
    r"|TORCHELASTIC|MASTER)_\w+"
    r"|JOB_COMPLETION_INDEX|JOB_NAME|SERVICE|(LOCAL_)?RANK|(LOCAL_)?WORLD_SIZE|GCE_METADATA_IP"
    r"|XDG_CACHE_HOME|TMPDIR|PYTHONPATH|LD_LIBRARY_PATH|LD_PRELOAD|ROCR_VISIBLE_DEVICES"
)
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|JWT|(^|_)KEY(S|$|_)|(^|_)AUTH")
_DEFAULTS = {"TF_CPP_MIN_LOG_LEVEL": "2", "UCX_DEBUG_SIGNO": "0", "UCX_HANDLE_ERRORS": ""}  # set by `import tfdist`
_PATH_SUFFIXES = ("_FILE", "_DIR")  # the path of a secret is not secret


def environment_section(environment: Mapping[str, str]) -> list[Finding]:
    """Returns the variables and the launcher of this process."""
    findings = [
        Finding(Status.OK, f"{name}={'(set, not shown)' if is_secret(name) else truncate(value)}")
        for name, value in sorted(environment.items())
        if _RELEVANT_VARIABLES.fullmatch(name) and _DEFAULTS.get(name) != value
    ]
    return [_launcher(environment), *findings]


def is_secret(name: str) -> bool:
    """Returns whether a variable may contain a secret, judging by its name."""
    return bool(_SECRET.search(name.upper())) and not name.endswith(_PATH_SUFFIXES)


def _launcher(environment: Mapping[str, str]) -> Finding:
    try:
        cluster = detect_cluster(environment)
    except InputError as error:
        return Finding(Status.WARNING, str(error), "Unset the variables of the wrong launcher.")
    return Finding(Status.OK, f"{describe(cluster)}{multi_process_hint(environment)}")


_LOOPBACK_TIMEOUT_SECONDS = 5.0  # for a message over the loopback interface
_INTERFACE_VARIABLE = "HOROVOD_GLOO_IFACE"


def network_section(environment: Mapping[str, str]) -> list[Finding]:
    """Returns the state of the network; even engines on one host need the loopback interface."""
    name, problem, interfaces = socket.gethostname(), loopback_problem(), psutil.net_if_addrs()
    loopback = Finding(Status.OK, f"ports of {LOOPBACK} can be bound and reached")
    if problem:
        remedy = "ip link set lo up, and permit connections over it in the firewall"
        loopback = Finding(Status.FAILED, f"{LOOPBACK} cannot be used: {problem}", remedy)
    described = (_describe_interface(interface, addresses) for interface, addresses in sorted(interfaces.items()))
    findings = [
        _name_finding(name, _resolve(name)),
        loopback,
        *(Finding(Status.OK, text) for text in described),
        _token(environment),
    ]
    gloo_interface = environment.get(_INTERFACE_VARIABLE)
    if gloo_interface and gloo_interface not in interfaces:
        text = f"{_INTERFACE_VARIABLE} names {gloo_interface}, an interface that this host does not have"
        findings.append(Finding(Status.WARNING, text, f"unset {_INTERFACE_VARIABLE}"))
    return findings


def loopback_problem() -> str:
    """Returns why a message cannot be sent over the loopback interface; empty if it can."""
    try:
        with socket.create_server((LOOPBACK, 0)) as server:
            server.settimeout(_LOOPBACK_TIMEOUT_SECONDS)
            with socket.create_connection(server.getsockname(), _LOOPBACK_TIMEOUT_SECONDS) as client_end:
                server_end, _ = server.accept()
                with server_end:
                    server_end.settimeout(_LOOPBACK_TIMEOUT_SECONDS)
                    client_end.sendall(b"?")
                    return "" if server_end.recv(1) == b"?" else "a message was lost"
    except OSError as error:
        return os.strerror(error.errno) if error.errno else str(error)


def _resolve(name: str) -> list[str]:
    with contextlib.suppress(OSError):
        infos = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(info[4][0]) for info in infos))
    return []


def _name_finding(name: str, addresses: list[str]) -> Finding:
    if not addresses:
        return Finding(
            Status.WARNING,
            f"the host name {name} cannot be resolved; jobs on several hosts require this",
            f"Add a line with this host's address and {name} to /etc/hosts.",
        )
    text = f"the host name {name} resolves to {', '.join(addresses)}"
    if all(map(is_loopback, addresses)):
        text += ", which other hosts cannot reach: in --coordinator, use the address of a network interface"
    return Finding(Status.OK, text)


def _describe_interface(name: str, addresses: Sequence[Any]) -> str:
    state = psutil.net_if_stats().get(name)
    texts = [each.address for each in addresses if each.family in (socket.AF_INET, socket.AF_INET6)]
    return f"{name} is {'up' if state and state.isup else 'down'}: {', '.join(texts) or 'no address'}"


def _token(environment: Mapping[str, str]) -> Finding:
    try:
        token = user_token(environment)
    except InputError as error:
        return Finding(Status.WARNING, str(error))
    insecure = " (jobs without a token are allowed)" if environment.get(INSECURE_VARIABLE) else ""
    if not token:
        return Finding(Status.OK, f"no token is set; only jobs on several hosts need one{insecure}")
    if len(token) >= MIN_TOKEN_LENGTH:
        return Finding(Status.OK, "a token for jobs on several hosts is set")
    problem = f"the token has {len(token)} characters; jobs on several hosts need {MIN_TOKEN_LENGTH}"
    remedy = "Create a longer one: python -c 'import secrets; print(secrets.token_hex(32))'"
    return Finding(Status.WARNING, problem, remedy)
