"""Flags for a program that takes none of its own: the environment variable TFDIST_FLAGS."""

import dataclasses
import os
import shlex
from collections.abc import Mapping
from typing import Any

from absl import flags as absl_flags

from tfdist.cli import command, flags
from tfdist.config.run_config import RunConfig
from tfdist.errors import InputError
from tfdist.grammar.spec import nearest

VARIABLE = "TFDIST_FLAGS"


def options(given: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> RunConfig:
    """The configuration that TFDIST_FLAGS and keyword arguments say; the latter win.

    Raises:
      InputError: either is wrong.
    """
    values = absl_flags.FlagValues()
    flags.define(values, RunConfig)
    command.parse(values, [VARIABLE, *flags_of(environment)], "run", "")
    config = flags.config(values, RunConfig)
    known = [field.name for field in dataclasses.fields(RunConfig)]
    for name in given:
        if name not in known:
            raise InputError(f"tfdist.distribute has no option {name}.{nearest(name, known)}")
    return dataclasses.replace(config, **given)


def flags_of(environment: Mapping[str, str] = os.environ) -> list[str]:
    """The flags in TFDIST_FLAGS, split as a shell does.

    Raises:
      InputError: a quotation does not end.
    """
    text = environment.get(VARIABLE, "")
    try:
        return shlex.split(text)
    except ValueError as error:
        raise InputError(f"{VARIABLE} must read like a command line. Received: {text!r}: {error}.") from error
