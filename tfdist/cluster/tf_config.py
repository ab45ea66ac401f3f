"""Parses TF_CONFIG, TensorFlow's description of a cluster, into addresses by rank."""

import collections
import json
import re
from collections.abc import Sequence
from typing import Any

from tfdist.errors import InputError

EXAMPLE = (
    """TF_CONFIG='{"cluster": {"worker": ["host1:12345", "host2:12345"]}, "task": {"type": "worker", "index": 0}}'"""
)

_TRAINING_JOBS = ("chief", "worker")
_RANKED_JOBS = (*_TRAINING_JOBS, "ps")  # in the order of ranks
EVALUATOR = "evaluator"
_JOBS = (*_RANKED_JOBS, EVALUATOR)
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[^\s:/\[\]]+):(\d{1,5})")
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


def parse(text: str) -> tuple[tuple[str, ...], int, int]:
    """Parses TF_CONFIG. Ranks are in the order chief (if any), workers, parameter servers.

    Args:
      text: JSON, `{"cluster": {"chief": [...], "worker": [...], "ps": [...]}, "task": {"type", "index"}}`.

    Returns:
      `host:port` of each process by rank, the rank of this process, and the number of parameter servers, which are the last.

    Raises:
      InputError: `text` does not describe a member of a training job.
    """
    try:
        config = json.loads(text)
    except ValueError as error:
        raise InputError(f"TF_CONFIG must be JSON: {error}. Received: {text!r}. Example: {EXAMPLE}") from error
    jobs = _parse_jobs(config)
    job_name, index = _parse_task(config, jobs)
    addresses = tuple(address for job in _RANKED_JOBS for address in jobs.get(job, ()))
    duplicates = [a for a, n in collections.Counter((host(a), port(a)) for a in addresses).items() if n > 1]
    if duplicates:
        raise InputError(
            f"TF_CONFIG must give each process a different address. Received: {duplicates[0][0]}:{duplicates[0][1]} "
            f"more than once in {list(addresses)}."
        )
    first_rank = sum(len(jobs.get(job, ())) for job in _RANKED_JOBS[: _RANKED_JOBS.index(job_name)])
    return addresses, first_rank + index, len(jobs.get("ps", ()))


def is_evaluator(text: str) -> bool:
    """Returns whether the task of a TF_CONFIG is the evaluator, which need not be in its cluster.

    Raises:
      InputError: it is one of several evaluators.
    """
    try:
        task = json.loads(text)["task"]
        is_task, index = task["type"] == EVALUATOR, task.get("index", 0)
    except (ValueError, LookupError, TypeError, AttributeError):  # `parse` reports these errors
        return False
    if is_task and str(index) != "0":
        raise InputError(f"TF_CONFIG may have only one evaluator, with index 0. Received: index {index!r}. Start one.")
    return is_task


def host(address: str) -> str:
    """Returns the normalized host of `host:port`; all loopback names become `localhost`."""
    name = address.rpartition(":")[0].lower()
    return "localhost" if name in _LOOPBACK else name


def port(address: str) -> int:
    """Returns the port of `host:port`."""
    return int(address.rpartition(":")[2])


def is_address(value: Any) -> bool:
    """Returns whether the value is `host:port`, with a port in [1, 65535] and brackets around an IPv6 host."""
    return isinstance(value, str) and bool(_ADDRESS.fullmatch(value)) and 1 <= port(value) <= 65535


def control_address(addresses: Sequence[str]) -> str:
    """Returns the address at which rank 0 serves the `Group`, derived from the TensorFlow addresses of a cluster.

    The group is formed before the processes are connected, so every process must derive its port from TF_CONFIG: rank 0's
    port + 1000, or - 1000 if that exceeds 65535. Launchers usually number the ports of a host's workers consecutively, so a
    port at this distance is probably free; if a worker uses it, the next one is taken.
    """
    first_address = addresses[0]
    used_ports = {port(address) for address in addresses if host(address) == host(first_address)}
    step = 1 if port(first_address) + 1000 <= 65535 else -1
    control_port = port(first_address) + 1000 * step
    while control_port in used_ports:
        control_port -= step
    return f"{first_address.rpartition(':')[0]}:{control_port}"


def _parse_jobs(config: Any) -> dict[str, list[str]]:
    jobs = config.get("cluster") if isinstance(config, dict) else None
    if not isinstance(jobs, dict) or not jobs:
        raise InputError(f"TF_CONFIG must have a `cluster` with its workers. Received: {config!r}. Example: {EXAMPLE}")
    for job, addresses in jobs.items():
        if job not in _JOBS:
            raise InputError(f"TF_CONFIG's `cluster` may have chief, worker, ps and evaluator. Received: {job!r}.")
        if not isinstance(addresses, list) or not all(map(is_address, addresses)):
            raise InputError(f"TF_CONFIG's `cluster` must list host:port for each {job}. Received: {addresses!r}.")
    if len(jobs.get("chief", ())) > 1:
        raise InputError(
            f"TF_CONFIG may have at most one chief. Received: {jobs['chief']}. List the others as workers."
        )
    if not any(jobs.get(job) for job in _TRAINING_JOBS):
        raise InputError(f"TF_CONFIG's `cluster` must have a worker. Received: {jobs!r}. Example: {EXAMPLE}")
    return jobs


def _parse_task(config: dict[str, Any], jobs: dict[str, list[str]]) -> tuple[str, int]:
    task = config.get("task")
    if not isinstance(task, dict) or not {"type", "index"} <= task.keys():
        raise InputError(
            f"TF_CONFIG must have a `task` with the `type` and `index` of this process. Received: {task!r}. "
            f"Example: {EXAMPLE}"
        )
    job_name, index = task["type"], task["index"]
    if job_name == EVALUATOR:
        raise InputError(
            "TF_CONFIG's task may be an evaluator only with `tfdist train`. Received: an evaluator. Start only the other "
            "tasks, and evaluate the run with `tfdist evaluate`."
        )
    if job_name not in _RANKED_JOBS or not jobs.get(job_name):
        raise InputError(
            f"TF_CONFIG's task type must be one of {[j for j in _RANKED_JOBS if jobs.get(j)]}. Received: {job_name!r}."
        )
    if isinstance(index, bool) or not re.fullmatch(r"\d+", str(index)) or int(index) >= len(jobs[job_name]):
        raise InputError(
            f"TF_CONFIG's task index must be in [0, {len(jobs[job_name])}), the number of addresses of {job_name}. "
            f"Received: {index!r}."
        )
    return job_name, int(index)
