"""Output of a command: lines of text or, with `--json`, one JSON object, as described in docs/reference/json.md.

`SCHEMA` is increased when a key is renamed or removed, or changes its meaning, but not for new keys.
"""

import contextlib
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

SCHEMA = 1


class Output:
    """The output of a command.

    Attributes:
      is_json: whether the result is printed as JSON.
      json_result: the result to be printed as JSON; None if there is none yet.
    """

    def __init__(self, is_json: bool = False):
        self.is_json = is_json
        self.json_result: Mapping[str, Any] | None = None

    def line(self, text: str = "") -> None:
        """Prints a line of text, unless `is_json`."""
        if not self.is_json:
            print(text, flush=True)

    def result(self, json_result: Mapping[str, Any]) -> None:
        """Sets the result, which is printed as JSON at the end of the command, if `is_json`.

        The keys of the JSON values are in snake_case and include the unit.
        """
        if self.is_json:
            self.json_result = json_result


TEXT = Output()  # prints text only


@contextlib.contextmanager
def open_output(command: str, is_json: bool) -> Iterator[Output]:
    """Yields the output of a command, and prints its result as JSON at the end, if `is_json`.

    Other writes to standard output, such as by a user's model or a C++ library, are redirected to standard error.
    """
    output = Output(is_json)
    if not output.is_json:
        yield output
        return
    with _standard_output_as_error():
        yield output
    if output.json_result is not None:  # only the chief has a result
        fields = {"schema": SCHEMA, "command": command, **_replace_non_finite(output.json_result)}
        print(json.dumps(fields, allow_nan=False), flush=True)


@contextlib.contextmanager
def _standard_output_as_error() -> Iterator[None]:
    sys.stdout.flush()
    stdout_copy = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        if sys.__stdout__ is not None:
            sys.__stdout__.flush()  # flushes what was written to it directly
        os.dup2(stdout_copy, 1)
        os.close(stdout_copy)


def _replace_non_finite(value: Any) -> Any:
    """Replaces inf and NaN, which JSON does not have, with None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _replace_non_finite(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_replace_non_finite(item) for item in value]
    return value
