"""Commands as a user starts them."""

import os
import subprocess
from collections.abc import Sequence
from typing import Any

from tfdist.cluster.environment import without_rank_variables


def run_as_user(
    command: Sequence[str], directory: str | os.PathLike[str], **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end without settings of the test process; what it prints has its errors, too."""
    inherited = without_rank_variables(os.environ)
    own = {name: value for name, value in inherited.items() if not name.startswith("TFDIST_")}
    return subprocess.run(
        command,
        cwd=directory,
        env=own | {"TF_CPP_MIN_LOG_LEVEL": "2"} | variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )


def captured(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end without input; its output and its errors are captured as text."""
    capture: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": 300}
    return subprocess.run(command, **capture | options)
