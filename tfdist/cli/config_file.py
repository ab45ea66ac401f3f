"""Reads `--config`: a YAML file that maps names of flags to their values.

A value is taken as it is written, as on a command line, and not as YAML 1.1 interprets it: there `10:20` is the number 620,
`1e-3` is text, and `no` is false.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import yaml

from tfdist.errors import InputError
from tfdist.storage.registry import text_of

KINDS: dict[type, str] = {str: "a single value", list: "a list", dict: "a mapping"}
_NULL, _BOOL = "tag:yaml.org,2002:null", "tag:yaml.org,2002:bool"


class Entry(NamedTuple):
    """A flag in a configuration file.

    Attributes:
      name: its name.
      text: its value, as on a command line.
      kind: form of the value: a key of `KINDS`.
      boolean: "true" or "false" if YAML takes the value for a boolean, else None.
      location: file and line, for messages.
    """

    name: str
    text: str
    kind: type
    boolean: str | None
    location: str


def read(path: str) -> list[Entry]:
    """Returns the flags in a configuration file, in its order.

    Raises:
      InputError: the file cannot be read, is not YAML, or is not a mapping of names to values.
    """
    try:
        root = yaml.compose(text_of(path), yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        cause = getattr(error, "strerror", None) or error
        raise InputError(f"--config must name a readable text file. Received: {path} ({cause}).") from error
    except RecursionError as error:
        raise InputError(f"--config must name a YAML file without deep nesting. Received: {path}.") from error
    except yaml.YAMLError as error:
        raise InputError(f"{_location(path, error)}: {_problem(error)}. --config must name a YAML file.") from error
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        raise InputError(
            "--config must name a file that maps names of flags to values, one per line, such as batch_size: 64. "
            f"Received: {path}. For flags as on a command line, use --flagfile."
        )
    return list(_entries(path, root))


def _entries(path: str, root: yaml.MappingNode) -> Iterator[Entry]:
    seen: set[str] = set()
    for key, value in root.value:
        location = f"{path}, line {key.start_mark.line + 1}"
        name = _scalar(location, key)
        if name in seen:
            raise InputError(f"{location}: {name} is given twice.")
        seen.add(name)
        yield Entry(name, *_value(f"{location}: {name}", value), location)


def _value(location: str, node: yaml.Node) -> tuple[str, type, str | None]:
    """Returns the text, the kind and the boolean of an `Entry`."""
    if isinstance(node, yaml.SequenceNode):
        return ",".join(_scalar(location, item) for item in node.value), list, None
    if isinstance(node, yaml.MappingNode):
        pairs = [f"{_scalar(location, key)}: {_scalar(location, item)}" for key, item in node.value]
        return "; ".join(pairs), dict, None
    text = _scalar(location, node)
    boolean = (
        yaml.SafeLoader.bool_values.get(text.lower()) if node.tag == _BOOL else None
    )  # `!!bool` may precede any text
    return text, str, None if boolean is None else str(boolean).lower()


def _scalar(location: str, node: yaml.Node) -> str:
    """Returns a value as it is written."""
    if not isinstance(node, yaml.ScalarNode):
        raise InputError(
            f"{location} must be a string, or a list or mapping of strings. Received: a nested list or mapping."
        )
    if node.tag == _NULL:
        raise InputError(f"{location} has no value. Write one, or leave it out.")
    return str(node.value)


def _location(path: str, error: yaml.YAMLError) -> str:
    mark: Any = getattr(error, "problem_mark", None)
    return f"{path}, line {mark.line + 1}" if mark else path


def _problem(error: yaml.YAMLError) -> str:
    return " ".join(str(getattr(error, "problem", None) or error).split()).rstrip(".")
