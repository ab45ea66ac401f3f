"""Starts the strategy of a command from its flags, handles lost peers, and compares the flags of all processes."""

import dataclasses
import inspect
import math
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Any

import tensorflow as tf

from tfdist.cli.early_checks import ProcessContext, detect_context
from tfdist.cluster.environment import Cluster
from tfdist.config.conflicts import check_strategy
from tfdist.config.fields import field_names, replace_fields
from tfdist.coordination import Group, PeerFailureHandler
from tfdist.distribution.factory import declaration, start, strategy_class
from tfdist.distribution.strategy import Strategy
from tfdist.distribution.strategy_selection import StrategyChoice, choose_strategy
from tfdist.errors import Preempted
from tfdist.reporting.environment import versions


def choose(config: Any, context: ProcessContext) -> StrategyChoice:
    """Returns the context's choice of strategy; makes the choice if the context has none."""
    if context.strategy_choice:
        return context.strategy_choice
    devices = config.devices or max(len(tf.config.list_physical_devices("GPU")), 1)
    return choose_strategy(context.environment, config.strategy, devices, declaration(config.strategy), context.cluster)


def start_strategy(config: Any) -> Strategy:
    """Starts the configured strategy for the rest of a program, which may handle lost ranks itself."""
    context = detect_context(config)
    strategy_choice = choose(config, context)
    options = _options(config, strategy_choice)
    if options.get("communication") == "auto":  # the engine's default, as in `load_strategy`
        del options["communication"]
    return start(strategy_choice, config.start_timeout_seconds, context.environment, options)


@contextmanager
def running_strategy(
    config: Any,
    context: ProcessContext | None = None,
    end_timeout_seconds: float = math.inf,
    more_options: Mapping[str, Any] = MappingProxyType({}),
) -> Iterator[tuple[Any, StrategyChoice, Strategy]]:
    """Starts the strategy and checks that all processes have the same flags and versions.

    The outcome of the body is reported to the other processes. If one of them is lost, this process exits with code 5.

    A finished process waits for the others, by default without a limit. `more_options` are further options of the strategy.

    Yields:
      The configuration, with the name of the strategy instead of "auto"; this name and the reason for the choice; the strategy.
    """
    context = context or detect_context(config)
    strategy_choice = choose(config, context)
    config = replace_fields(config, strategy=strategy_choice.strategy)
    if not context.strategy_choice:  # else the flags have been checked
        check_strategy(config, declaration(strategy_choice.strategy))
    options = {**_options(config, strategy_choice), **more_options}
    # Lost peers are handled as soon as the group has started, because an engine may wait forever for a lost peer at startup.
    with ExitStack() as stack:

        def handle_failures(group: Group, cluster: Cluster) -> None:
            stack.enter_context(PeerFailureHandler(group, cluster))

        strategy = start(strategy_choice, config.start_timeout_seconds, context.environment, options, handle_failures)
        per_process = field_names(config, "per_process")
        shared_flags = {f"--{k}": v for k, v in dataclasses.asdict(config).items() if k not in per_process}
        if strategy.communication:
            strategy_choice = dataclasses.replace(
                strategy_choice, reason=f"{strategy_choice.reason} {strategy.communication}"
            )
        strategy.group.agree("flags", shared_flags)
        strategy.group.agree("versions", versions(), "version of ")
        try:
            yield config, strategy_choice, strategy
        except Preempted:
            strategy.group.barrier("end", deadline=end_timeout_seconds)
            raise
        # A process that finishes early waits; otherwise the last collectives of the others would fail.
        strategy.group.barrier("end", deadline=end_timeout_seconds)
    strategy.close()


def _options(config: Any, strategy_choice: StrategyChoice) -> dict[str, Any]:
    """Returns the options that a strategy's constructor takes; a user-defined strategy keeps its own defaults."""
    parameters = inspect.signature(strategy_class(strategy_choice.strategy)).parameters
    options = {name: getattr(config, name) for name in field_names(config, "is_option") if name in parameters}
    if ":" in strategy_choice.strategy:
        defaults = {field.name: field.default for field in dataclasses.fields(config)}
        options = {
            name: value
            for name, value in options.items()
            if value != defaults[name] or parameters[name].default is inspect.Parameter.empty
        }
    if "groups" in parameters and hasattr(config, "sync"):
        options["groups"] = config.parsed.sync.groups(strategy_choice.cluster.size)
    return options


def host_names(strategy: Strategy) -> list[str]:
    """Returns the host name of each process, ordered by rank; every process must call it."""
    return strategy.group.gather("hosts", socket.gethostname())
