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
      facts: the result to be printed as JSON; None if there is none yet.
    """

    def __init__(self, is_json: bool = False):
        self.is_json = is_json
        self.facts: Mapping[str, Any] | None = None

    def line(self, text: str = "") -> None:
        """Prints a line of text, unless `is_json`."""
        if not self.is_json:
            print(text, flush=True)

    def result(self, facts: Mapping[str, Any]) -> None:
        """Sets the result, which is printed as JSON at the end of the command, if `is_json`.

        The keys of the JSON values are in snake_case and include the unit.
        """
        if self.is_json:
            self.facts = facts


TEXT = Output()  # prints text only


@contextlib.contextmanager
def open_output(command: str, is_json: bool) -> Iterator[Output]:
    """Yields the output of a command, and prints its result as JSON at the end, if `is_json`.

    Meanwhile, other writes to standard output, such as by a user's model or a C++ library, are redirected to standard error.
    """
    output = Output(is_json)
    if not output.is_json:
        yield output
        return
    with _standard_output_as_error():
        yield output
    if output.facts is not None:  # the chief has it; other ranks print nothing
        print(
            json.dumps({"schema": SCHEMA, "command": command, **_replace_non_finite(output.facts)}, allow_nan=False),
            flush=True,
        )


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
            sys.__stdout__.flush()  # writes through the stream itself
        os.dup2(stdout_copy, 1)
        os.close(stdout_copy)


def _replace_non_finite(value: Any) -> Any:
    """Replaces inf and NaN, which JSON does not have, by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _replace_non_finite(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_replace_non_finite(item) for item in value]
    return value
