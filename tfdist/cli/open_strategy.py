"""Opens a strategy for a command: starts it from flags, handles lost peers, and compares the flags of all processes."""

import dataclasses
import inspect
import math
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

import tensorflow as tf

from tfdist.cli.early_checks import ProcessContext, detect_context
from tfdist.cluster.environment import Cluster
from tfdist.config.conflicts import check_strategy
from tfdist.config.fields import field_names, replaced
from tfdist.coordination import Group, PeerFailureHandler
from tfdist.distribution.factory import declaration, start, strategy_class
from tfdist.distribution.strategy import Strategy
from tfdist.distribution.strategy_selection import Detection, detect
from tfdist.errors import Preempted
from tfdist.reporting.environment import versions


class Opened(NamedTuple):
    """A strategy that is running.

    Attributes:
      config: the configuration, with the name of the strategy instead of "auto".
      detection: the chosen strategy and the reason.
      strategy: the strategy.
    """

    config: Any
    detection: Detection
    strategy: Strategy


def choose(config: Any, context: ProcessContext) -> Detection:
    """Chooses the strategy, unless that has been done."""
    if context.detection:
        return context.detection
    devices = config.devices or max(len(tf.config.list_physical_devices("GPU")), 1)
    return detect(context.environment, config.strategy, devices, declaration(config.strategy), context.cluster)


def load(config: Any) -> Strategy:
    """Starts the strategy of a configuration, for a program that uses it until its end and may catch the loss of a rank."""
    context = detect_context(config)
    detection = choose(config, context)
    options = _options(config, detection)
    if options.get("communication") == "auto":  # the engine's default, as in `load_strategy`
        del options["communication"]
    return start(detection, config.start_timeout_seconds, context.environment, options)


@contextmanager
def opened_strategy(
    config: Any,
    context: ProcessContext | None = None,
    end_timeout_seconds: float = math.inf,
    more_options: Mapping[str, Any] = MappingProxyType({}),
) -> Iterator[Opened]:
    """Starts the strategy and checks that all processes have the same flags and versions.

    The way in which the body ends is reported to the other processes; if one of them is lost, this one exits with code
    5.

    Args:
      config: a configuration with the flags of strategy and devices.
      context: the context of this process; detected by default.
      end_timeout_seconds: seconds that a finished process waits for the others; by default, as long as they run.
      more_options: options of the strategy besides those of the configuration.
    """
    context = context or detect_context(config)
    detection = choose(config, context)
    config = replaced(config, strategy=detection.strategy)
    if not context.detection:  # else the flags have been checked
        check_strategy(config, declaration(detection.strategy))
    options = {**_options(config, detection), **more_options}
    # Losses are handled as soon as there is a group, because an engine may wait forever at startup for a lost peer.
    with ExitStack() as stack:

        def watch_over(group: Group, cluster: Cluster) -> None:
            stack.enter_context(PeerFailureHandler(group, cluster))

        strategy = start(detection, config.start_timeout_seconds, context.environment, options, watch_over)
        per_process = field_names(config, "per_process")
        shared = {f"--{k}": v for k, v in dataclasses.asdict(config).items() if k not in per_process}
        if strategy.communication:
            detection = dataclasses.replace(detection, reason=f"{detection.reason} {strategy.communication}")
        strategy.group.agree("flags", shared)
        strategy.group.agree("versions", versions(), "version of ")
        with _final_barrier(strategy.group, end_timeout_seconds):
            yield Opened(config, detection, strategy)
    strategy.close()


@contextmanager
def _final_barrier(group: Group, seconds: float) -> Iterator[None]:
    """Makes processes that finish or save early wait, so that the last collectives of the others do not fail."""
    try:
        yield
    except Preempted:
        group.barrier("end", deadline=seconds)
        raise
    group.barrier("end", deadline=seconds)


def _options(config: Any, detection: Detection) -> dict[str, Any]:
    """Returns the options that a strategy's constructor takes; a user's strategy keeps its own defaults."""
    parameters = inspect.signature(strategy_class(detection.strategy)).parameters
    options = {name: getattr(config, name) for name in field_names(config, "is_option") if name in parameters}
    if ":" in detection.strategy:
        defaults = {field.name: field.default for field in dataclasses.fields(config)}
        options = {
            name: value
            for name, value in options.items()
            if value != defaults[name] or parameters[name].default is inspect.Parameter.empty
        }
    if "groups" in parameters and hasattr(config, "sync"):
        options["groups"] = config.parsed.sync.groups(detection.cluster.size)
    return options


def hosts(strategy: Strategy) -> list[str]:
    """Returns the host name of each process, by rank."""
    return strategy.group.gather("hosts", socket.gethostname())
