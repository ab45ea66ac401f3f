"""Entry point of the processes of `spawn`."""

import json
import os
import pathlib
import sys
from collections.abc import Callable

from tfdist.errors import ExitCode, TfdistError
from tfdist.errors.engine_errors import out_of_memory
from tfdist.launcher import pickled_call

# Sets the parent's search path before anything of tfdist is imported; `-m` would need it in the environment.
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from tfdist.launcher import spawn_entry; sys.exit(spawn_entry.main(sys.argv[2], int(sys.argv[3])))"
)


def command(directory: pathlib.Path) -> Callable[[int], list[str]]:
    """Returns a function from a rank to its command, which makes the call that is stored in a directory."""
    search_path = json.dumps([os.path.abspath(entry) for entry in sys.path])
    return lambda rank: [sys.executable, "-c", _BOOT, search_path, str(directory), str(rank)]


def main(directory: str, rank: int) -> int:
    """Makes the call that is stored in a directory.

    Args:
      directory: contains the call, and receives the result.
      rank: rank of this process.

    Returns:
      The exit code.
    """
    sys.argv = [sys.argv[0]]
    error = pickled_call.make_call(pathlib.Path(directory), rank).error
    if isinstance(error, TfdistError):
        return error.exit_code
    if error and out_of_memory(error):
        return ExitCode.OUT_OF_MEMORY
    return ExitCode.FAILED if error else ExitCode.DONE
