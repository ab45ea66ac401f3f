"""Checks the environment and the files of a command before TensorFlow is imported, which takes seconds.

Files that are missing on only some hosts are reported after all processes have joined, so that none of them waits for a
process that has already failed.
"""

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from tfdist.cluster.environment import Cluster, detect_cluster
from tfdist.config.conflicts import check_strategy
from tfdist.config.dataset_files import check_files
from tfdist.config.strategy_registry import AUTO, strategy_declaration
from tfdist.coordination import job_token
from tfdist.distribution.strategy_selection import StrategyChoice, choose_strategy


class ProcessContext(NamedTuple):
    """The environment of this process, and its position in the job."""

    environment: Mapping[str, str]  # environment variables, some of them replaced by flags
    cluster: Cluster  # the position of this process in the job
    strategy_choice: StrategyChoice | None = None  # with the reason; None if the choice requires TensorFlow


def detect_context(config: Any, environment: Mapping[str, str] = os.environ) -> ProcessContext:
    """Detects the context of this process; raises `InputError` if its variables are inconsistent."""
    coordinator = {"TFDIST_COORDINATOR": config.coordinator} if config.coordinator else {}
    environment = job_token.add_token_flags({**environment, **coordinator}, config.token_file, config.insecure)
    return ProcessContext(environment, detect_cluster(environment))


def check_cluster(config: Any, context: ProcessContext) -> ProcessContext:
    """Chooses the strategy, if possible without TensorFlow.

    Raises:
      InputError: the job or the other flags are not valid for the strategy.
    """
    if ":" in config.strategy or (config.strategy == AUTO and not config.devices):
        return context  # the declaration of a user's strategy, or the number of devices, requires TensorFlow
    strategy_choice = choose_strategy(context.environment, config.strategy, config.devices, cluster=context.cluster)
    strategy = strategy_declaration(strategy_choice.strategy)
    if strategy.name != config.strategy:  # otherwise it is checked with the other flags
        check_strategy(config, strategy)
    if strategy.check_cluster:
        strategy.check_cluster(config, context.cluster)
    return context._replace(strategy_choice=strategy_choice)


def check_data(config: Any, context: ProcessContext) -> None:
    """Raises `InputError` if files of the dataset are missing; checks only if all processes are on this host."""
    if context.cluster.local_size == context.cluster.size:
        check_files(config.dataset, config.data_dir)
