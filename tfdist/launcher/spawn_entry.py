"""Entry point of the processes of `spawn`."""

import pathlib
import sys

from tfdist.errors import ExitCode, TfdistError
from tfdist.errors.engine_errors import out_of_memory
from tfdist.launcher import pickled_call

# Sets the parent's search path before anything of tfdist is imported; `-m` would need it in the environment.
BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from tfdist.launcher import spawn_entry; sys.exit(spawn_entry.main(sys.argv[2], int(sys.argv[3])))"
)


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
