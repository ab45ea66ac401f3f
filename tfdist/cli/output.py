"""Output of a command: lines of text as they are produced or, with `--json`, one JSON object and nothing else.

docs/reference/json.md describes the objects. `SCHEMA` grows when a key is renamed or removed, or changes its meaning; not for
new keys.
"""

import contextlib
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

SCHEMA = 1


def text_table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Returns the lines of a table whose columns are aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


class Output:
    """The output of a command.

    Attributes:
      is_json: whether the result is printed as JSON.
      facts: the result, if it is printed as JSON and there is one yet.
    """

    def __init__(self, is_json: bool = False):
        self.is_json = is_json
        self.facts: Mapping[str, Any] | None = None

    def line(self, text: str = "") -> None:
        """Prints a line of text, unless the result is printed as JSON."""
        if not self.is_json:
            print(text, flush=True)

    def result(self, facts: Mapping[str, Any]) -> None:
        """Sets the result, which is printed as JSON when the command ends, if `is_json`.

        Args:
          facts: the contents of the text as JSON values; keys are in snake_case, and include the unit.
        """
        if self.is_json:
            self.facts = facts


TEXT = Output()  # prints text only


@contextlib.contextmanager
def opened(command: str, is_json: bool) -> Iterator[Output]:
    """Yields the output of a command, and prints its result as JSON at the end, if `is_json`.

    Whatever else writes to standard output meanwhile, such as a user's model or a library in C++, writes to standard error
    then.

    Args:
      command: name of the command.
      is_json: whether the result is printed as JSON.
    """
    output = Output(is_json)
    if not output.is_json:
        yield output
        return
    with _standard_output_as_error():
        yield output
    if output.facts is not None:  # the chief has it; other ranks print nothing
        print(json.dumps({"schema": SCHEMA, "command": command, **_finite(output.facts)}, allow_nan=False), flush=True)


@contextlib.contextmanager
def _standard_output_as_error() -> Iterator[None]:
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        if sys.__stdout__ is not None:
            sys.__stdout__.flush()  # writes through the stream itself
        os.dup2(saved, 1)
        os.close(saved)


def _finite(value: Any) -> Any:
    """Replaces numbers that JSON does not have, inf and NaN, by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(item) for item in value]
    return value
