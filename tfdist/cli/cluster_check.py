"""Check of the job that the environment describes, before TensorFlow is imported, which takes seconds."""

import os
from collections.abc import Mapping
from typing import Any

from tfdist.config.conflicts import check_strategy
from tfdist.config.strategy_registry import declared
from tfdist.coordination import job_token
from tfdist.distribution.strategy_selection import detect
from tfdist.errors import InputError


def check_cluster(config: Any, environment: Mapping[str, str] = os.environ) -> None:
    """Checks the variables of launchers, and whether they and the other flags suit the strategy.

    Raises:
      InputError: they are incomplete, contradict each other, or do not suit it.
    """
    if ":" in config.strategy:  # what a user's own strategy declares is known only after its import
        return
    # How many devices there are is known only to TensorFlow: what is refused for one and for several is refused.
    counts = (config.devices,) if config.devices else (1, 2)
    found = [detect(with_flags(environment, config), config.strategy, devices) for devices in counts]
    refusals = [_refusal(config, detection.strategy, detection.cluster.size) for detection in found]
    if all(refusals):
        raise InputError(refusals[0])


def _refusal(config: Any, strategy: str, processes: int) -> str:
    """Returns why the flags do not suit a strategy with this number of processes; empty if they do."""
    declaration = declared(strategy)
    try:
        check_strategy(config, declaration)
        if declaration.check_processes:
            declaration.check_processes(config, processes)
    except InputError as error:
        return str(error)
    return ""


def with_flags(environment: Mapping[str, str], config: Any) -> Mapping[str, str]:
    """Returns the environment with the variables that flags replace."""
    coordinator = {"TFDIST_COORDINATOR": config.coordinator} if config.coordinator else {}
    return job_token.with_flags({**environment, **coordinator}, config.token_file, config.insecure)
