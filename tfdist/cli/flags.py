"""Converts absl flags to configurations and back. Flags are defined only by the fields of configurations."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

from absl import flags as absl_flags

from tfdist.config.conflicts import flag_text
from tfdist.config.fields import NO_EFFECT_HELP, TOPICS
from tfdist.config.train_config import TrainConfig

Config = TypeVar("Config")  # a dataclass whose fields each have a `tfdist.config.fields.Flag`

_DEFINE: dict[type, Callable[..., Any]] = {
    bool: absl_flags.DEFINE_boolean,
    int: absl_flags.DEFINE_integer,
    float: absl_flags.DEFINE_float,
}


class TextParser(absl_flags.ArgumentParser[str]):
    """Parses a flag that is a text, and has the properties that help and configuration files need.

    Attributes:
      choices: allowed texts; empty for any.
    """

    syntactic_help = ""

    def __init__(self, choices: tuple[str, ...] = ()):
        self.choices = choices


def define(flag_values: absl_flags.FlagValues, config_type: type[Any] = TrainConfig) -> None:
    """Defines a flag for each field of a dataclass whose fields each have a `tfdist.config.fields.Flag`."""
    ignored_flags = getattr(config_type, "ignored_flags", ())
    topics = {
        field.name: NO_EFFECT_HELP if field.name in ignored_flags else field.metadata["flag"].topic
        for field in dataclasses.fields(config_type)
    }
    positions = {topic: position for position, topic in enumerate((*TOPICS, NO_EFFECT_HELP))}
    # A command's own topics come first.
    for field in sorted(dataclasses.fields(config_type), key=lambda field: positions.get(topics[field.name], -1)):
        flag, topic = field.metadata["flag"], topics[field.name]
        define_flag(flag_values, topic, type(field.default), field.name, field.default, flag.help, flag.choices)


def define_flag(
    flag_values: absl_flags.FlagValues,
    topic: str,
    kind: type,
    name: str,
    default: Any,
    help_text: str,
    choices: tuple[str, ...] = (),
) -> None:
    """Defines a flag of type bool, int or float, or a text for any other `kind`."""
    # absl groups flags by the module that defines them, while the help groups them by topic.
    options: dict[str, Any] = {"flag_values": flag_values, "module_name": topic}
    if define_number := _DEFINE.get(kind):
        define_number(name, default, help_text, **options)
    else:
        serializer: Any = absl_flags.ArgumentSerializer()
        absl_flags.DEFINE(TextParser(choices), name, default, help_text, serializer=serializer, **options)


def config(flag_values: absl_flags.FlagValues, config_type: type[Config] = TrainConfig) -> Config:  # type: ignore[assignment]  # a TypeVar's default
    """Returns the configuration of parsed flags, or raises its `InputError`."""
    fields = dataclasses.fields(config_type)  # type: ignore[arg-type]  # a dataclass
    values: dict[str, Any] = {field.name: flag_values[field.name].value for field in fields}
    return config_type(**values)


def flags_text(config: Any) -> str:
    """Returns the contents of an equivalent `--flagfile`, one flag per line.

    The output directory is commented out: a repeated run gets its own directory.
    """
    lines = [flag_text(field.name, getattr(config, field.name)) for field in dataclasses.fields(config)]
    return "".join(f"# {line}\n" if line.startswith("--output_dir=") else f"{line}\n" for line in lines)
