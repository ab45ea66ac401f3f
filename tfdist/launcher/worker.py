"""The new process of a `spawn`: makes its call."""

import pathlib
import sys

from tfdist.errors import ExitCode, TfdistError
from tfdist.launcher import calls

# The search path of whoever spawned, before anything of tfdist is imported; a -m would need it in the environment.
BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from tfdist.launcher import worker; sys.exit(worker.main(sys.argv[2], int(sys.argv[3])))"
)


def main(directory: str, rank: int) -> int:
    """Makes the call that is written in a directory.

    Args:
      directory: where it is, and where the result goes.
      rank: this process's.

    Returns:
      The exit code.
    """
    sys.argv = [sys.argv[0]]
    error = calls.make_call(pathlib.Path(directory), rank).error
    if isinstance(error, TfdistError):
        return error.exit_code
    return ExitCode.FAILED if error else ExitCode.DONE
