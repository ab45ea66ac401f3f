"""Reads flags from the environment variable TFDIST_FLAGS, for programs that do not define tfdist's flags."""

import dataclasses
import os
import shlex
from collections.abc import Mapping
from typing import Any

from absl import flags as absl_flags

from tfdist.cli import command, flags
from tfdist.config.job_config import RunConfig
from tfdist.errors import InputError, nearest

VARIABLE = "TFDIST_FLAGS"


def options(overrides: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> RunConfig:
    """Returns the configuration from TFDIST_FLAGS and keyword arguments, which take precedence.

    Raises:
      InputError: either is invalid.
    """
    values = absl_flags.FlagValues()
    flags.define(values, RunConfig)
    command.parse(values, [VARIABLE, *split_flags(environment)], "tfdist run", "")
    config = flags.config(values, RunConfig)
    names = [field.name for field in dataclasses.fields(RunConfig)]
    for name in overrides:
        if name not in names:
            raise InputError(f"tfdist.distribute has no option {name}.{nearest(name, names)}")
    return dataclasses.replace(config, **overrides)


def split_flags(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Returns the flags in TFDIST_FLAGS, split as by a shell.

    Raises:
      InputError: a quote is not closed, or the text does not start with a flag.
    """
    text = environment.get(VARIABLE, "")
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise InputError(f"{VARIABLE} must be written as on a command line. Received: {text!r}: {error}.") from error
    if words and not words[0].startswith("-"):
        raise InputError(f"{VARIABLE} must be flags, written --name=value. Received: {text!r}. Write --{words[0]}.")
    return words
