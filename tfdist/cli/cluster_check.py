"""What the environment says of a job, read and checked before TensorFlow is imported, which takes seconds."""

import os
from collections.abc import Mapping
from typing import Any

from tfdist.config.strategy_registry import declared
from tfdist.coordination import job_token
from tfdist.distribution.strategy_selection import detect


def check_cluster(config: Any, environment: Mapping[str, str] = os.environ) -> None:
    """Checks the variables of launchers, and whether they suit the strategy.

    Raises:
      InputError: they are incomplete, contradict each other, or do not suit it.
    """
    if ":" not in config.strategy:  # what a user's own strategy declares is known only after its import
        found = detect(with_flags(environment, config), config.strategy)
        check_processes = declared(found.strategy).check_processes
        if check_processes:
            check_processes(config, found.cluster.size)


def with_flags(environment: Mapping[str, str], config: Any) -> Mapping[str, str]:
    """Returns the environment with the variables that flags replace."""
    coordinator = {"TFDIST_COORDINATOR": config.coordinator} if config.coordinator else {}
    return job_token.with_flags({**environment, **coordinator}, config.token_file, config.insecure)
