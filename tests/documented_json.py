"""The keys of `--json`, and of JSON files, as docs/reference/json.md lists them."""

import json
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tfdist.cli.output import Output

DOCUMENT = pathlib.Path(__file__).parents[1] / "docs" / "reference" / "json.md"


def check(command: str, record: Mapping[str, Any], flags: str = "") -> None:
    """Checks that a record has documented keys only, and all documented keys of its top level.

    Args:
      command: name of the command.
      record: the record.
      flags: flags before `--json` in the title of the section, of those that change the keys.
    """
    assert record["command"] == command
    _check(keys(command, flags), {name: value for name, value in record.items() if name != "command"})


def printed(command: str, main: Callable[..., int], *arguments: Any, code: int = 0) -> dict[str, Any]:
    """Calls the main function of a command with `--json`; returns what it prints, whose keys are documented."""
    output = Output(is_json=True)
    assert main(*arguments, output) == code
    record = {"schema": 1, "command": command, **json.loads(json.dumps(output.json_result))}
    check(command, record)
    return record


def check_file(name: str, record: Mapping[str, Any]) -> None:
    """Checks the contents of a file that a run writes, in the same way."""
    _check(_keys(f"`{name}`"), record)


def keys(command: str, flags: str = "") -> list[str]:
    """Returns a regular expression for each documented key of a command."""
    return _keys(f"`tfdist {command} {flags}")


def _check(documented: list[str], record: Mapping[str, Any]) -> None:
    found = {path for path in _paths(record) if path != "schema"}
    assert record["schema"] == 1
    unknown = {path for path in found if not any(re.fullmatch(pattern, path) for pattern in documented)}
    assert not unknown, f"not in {DOCUMENT.name}: {sorted(unknown)}"
    top = {re.split(r"\\\.|\\\[", pattern)[0] for pattern in documented}
    assert top == record.keys() - {"schema"}


def _keys(title: str) -> list[str]:
    text = DOCUMENT.read_text(encoding="utf-8")
    section = next(part for part in text.split("\n## ") if part.startswith(title))
    cells = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    names = [name for cell in cells for name in re.findall(r"`([^`]*)`", cell)]
    return [re.sub(r"\\\*|[A-Z]{2,}", "[^.]+", re.escape(name)) for name in names]


def _paths(value: Any, path: str = "") -> Iterator[str]:
    """Yields the path of each value: with a dot before a key, and [] for the elements of a list."""
    if isinstance(value, Mapping) and value:
        for key, each in value.items():
            yield from _paths(each, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and value:
        for each in value:
            yield from _paths(each, f"{path}[]")
    elif value not in ([], {}, None):
        yield path
