"""The terminal of a launcher, on which it shows the progress bar of rank 0 although that writes to a pipe."""

import os
from collections.abc import Mapping

VARIABLE = "TFDIST_TERMINAL_COLUMNS"  # columns of the terminal; set for rank 0 if stderr of the launcher is a terminal


def columns(environment: Mapping[str, str] = os.environ) -> int:
    """Returns the number of columns of the launcher's terminal; 0 if there is none."""
    text = environment.get(VARIABLE, "")
    return int(text) if text.isdecimal() else 0
