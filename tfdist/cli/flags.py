"""Converts absl flags to configurations and back. The fields of the configurations are the only definition of flags."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

from absl import flags as absl_flags

from tfdist.config.conflicts import flag_text
from tfdist.config.topics import TOPICS
from tfdist.config.train_config import TrainConfig

Config = TypeVar("Config")  # a dataclass whose fields each have a `tfdist.config.fields.Flag`

_DEFINE: dict[type, Callable[..., Any]] = {
    bool: absl_flags.DEFINE_boolean,
    int: absl_flags.DEFINE_integer,
    float: absl_flags.DEFINE_float,
    str: absl_flags.DEFINE_string,
    type(None): absl_flags.DEFINE_string,
}


def define(flag_values: absl_flags.FlagValues, config_type: type[Any] = TrainConfig) -> None:
    """Defines a flag for each field of a configuration.

    Args:
      flag_values: where to define them; a command uses a new one, so that it has only these flags.
      config_type: `TrainConfig`, or another dataclass whose fields each have a `tfdist.config.fields.Flag`.
    """
    for field in sorted(dataclasses.fields(config_type), key=_topic):
        flag = field.metadata["flag"]
        # absl groups flags by the module that defines them, while the help groups them by topic.
        _DEFINE[type(field.default)](
            field.name, field.default, flag.help, flag_values=flag_values, module_name=flag.topic
        )


def _topic(field: dataclasses.Field) -> int:
    """Returns the position in the help; a command's own topics come first."""
    topic = field.metadata["flag"].topic
    return TOPICS.index(topic) if topic in TOPICS else -1


def config(flag_values: absl_flags.FlagValues, config_type: type[Config] = TrainConfig) -> Config:  # type: ignore[assignment]  # a TypeVar's default
    """Returns the configuration of parsed flags.

    Raises:
      InputError: a flag is out of range, or two flags exclude each other.
    """
    fields = dataclasses.fields(config_type)  # type: ignore[arg-type]  # a dataclass, which types cannot express
    values: dict[str, Any] = {field.name: flag_values[field.name].value for field in fields}
    return config_type(**values)


def flags_text(config: Any) -> str:
    """Returns the contents of an equivalent `--flagfile`, one flag per line.

    The output directory is commented out, so that a repeated run gets its own directory.
    """
    lines = [flag_text(field.name, getattr(config, field.name)) for field in dataclasses.fields(config)]
    return "".join(f"# {line}\n" if line.startswith("--output_dir=") else f"{line}\n" for line in lines)
