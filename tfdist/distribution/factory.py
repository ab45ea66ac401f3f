"""Starts a strategy by name: detects the environment, joins the group and starts the engine, in this order."""

import dataclasses
import importlib
import inspect
import os
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from tfdist.cluster import quiet_tensorflow
from tfdist.cluster.environment import Cluster
from tfdist.config.conflicts import find_rejected_option, flag_text
from tfdist.config.fields import normalize_field, takes_options
from tfdist.config.spec import load_object
from tfdist.config.strategy_registry import AUTO, Declaration, JobOptions, TrainerOptions, strategy_declaration
from tfdist.coordination import Group, join
from tfdist.distribution.strategy import Strategy
from tfdist.distribution.strategy_selection import StrategyChoice, choose_strategy
from tfdist.errors import InputError, names_arguments, nearest

_strategies: list[weakref.ref[Strategy]] = []


@names_arguments
@takes_options(JobOptions, "is_option")
@takes_options(TrainerOptions, "is_option")
def load_strategy(
    name: str = AUTO,
    *,
    start_timeout_seconds: float = 120.0,
    environment: Mapping[str, str] | None = None,
    **options: Any,
) -> Strategy:
    """Starts a strategy. Call it on every process of the job, before anything else uses TensorFlow.

    Args:
      name: as in `--strategy`: the name of a strategy, "package.module:Class", or "auto" to detect it from the
        environment.
      start_timeout_seconds: how long to wait for the other processes.
      environment: environment variables; by default, `os.environ`.
      **options: options of the strategy, for example `devices=2` for mirrored: the flags of `--strategy` in the help of
        `tfdist train`, or the arguments of your own class.

    Raises:
      InputError: the name, an option or the environment is invalid.
      PeerLostError: a process did not join in time.
    """
    if not isinstance(name, str):
        raise InputError(f'The name of a strategy must be a string, such as "mirrored". Received: {name!r:.60}.')
    fields = {field.name: field for config in (JobOptions, TrainerOptions) for field in dataclasses.fields(config)}
    known_options = {name: field for name, field in fields.items() if field.metadata["flag"].is_option}
    options = {  # options of a user-defined class have no flags
        name: normalize_field(known_options[name], value)[0] if name in known_options else value
        for name, value in options.items()
    }
    variables = os.environ if environment is None else environment
    strategy_choice = choose_strategy(variables, name, options.get("devices", 0) or 1, declaration(name))
    if unknown := find_rejected_option(options, declaration(strategy_choice.strategy)):
        option, rule = unknown
        raise InputError(f"{rule} Received: {flag_text(option, options[option])}.")
    return start(strategy_choice, start_timeout_seconds, variables, options)


def start(
    strategy_choice: StrategyChoice,
    start_timeout_seconds: float,
    environment: Mapping[str, str],
    options: Mapping[str, Any],
    on_join: Callable[[Group, Cluster], object] = lambda group, cluster: None,
) -> Strategy:
    """Starts the strategy that `choose_strategy` chose.

    A constructor may have the parameter `start_timeout_seconds`. `on_join` is called after the group is joined and before the
    engine starts, because its start may wait forever for a lost process.
    """

    def join_group(cluster: Cluster) -> Group:
        group = join(cluster, start_timeout=start_timeout_seconds, environment=environment)
        on_join(group, cluster)
        return group

    if "start_timeout_seconds" in inspect.signature(strategy_class(strategy_choice.strategy)).parameters:
        options = {**options, "start_timeout_seconds": start_timeout_seconds}
    quiet_tensorflow.detect_devices()
    strategy = create(strategy_choice.strategy, strategy_choice.cluster, join_group, options)
    _strategies.append(weakref.ref(strategy))
    return strategy


def started_strategies() -> list[Strategy]:
    """Returns the strategies of this process that are still in use, in the order of their start."""
    return [strategy for reference in _strategies if (strategy := reference()) is not None]


def declaration(name: str) -> Declaration:
    """Returns the declaration of a strategy, from the registry or the class `package.module:Class`.

    Raises:
      InputError: there is no strategy of this name.
    """
    class_declaration = strategy_class(name).declaration if ":" in name else None
    return class_declaration or strategy_declaration(name)


def strategy_class(name: str) -> type[Strategy]:
    """Returns the class of a strategy, given its name or `package.module:Class`.

    Raises:
      InputError: there is no strategy of this name.
    """
    if ":" in name:
        strategy_type = load_object(name)
        if not (isinstance(strategy_type, type) and issubclass(strategy_type, Strategy)):
            raise InputError(f"--strategy={name} must name a subclass of tfdist.Strategy. Received: {strategy_type!r}.")
        return strategy_type
    strategy_declaration(name)  # raises for unknown names
    try:
        module = importlib.import_module(f"tfdist.strategies.{name}")
    except ModuleNotFoundError as error:
        if error.name == "tfdist.strategies":
            raise InputError(
                "tfdist is not installed: this is a bare checkout. Run `pip install -e .` in it."
            ) from error
        raise
    return module.STRATEGY


def create(
    name: str, cluster: Cluster, join: Callable[[Cluster], Group], options: Mapping[str, Any] | None = None
) -> Strategy:
    """Creates a strategy; its constructor calls `join` once, when it knows the address of the job's group.

    Raises:
      InputError: the strategy does not have one of the options, or is not available here.
    """
    strategy_type = strategy_class(name)
    known_options = [p for p in inspect.signature(strategy_type).parameters if p not in ("cluster", "join")]
    for option in options or {}:
        if option not in known_options:
            raise InputError(f"The strategy {name} has no option {option}.{nearest(option, known_options)}")
    strategy: Strategy = strategy_type(cluster=cluster, join=join, **dict(options or {}))  # type: ignore[call-arg]  # a convention
    return strategy
