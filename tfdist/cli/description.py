"""Descriptions of the commands as data: their arguments, examples and flags."""

import contextlib
import io
import json
import runpy
import sys
import warnings
from typing import Any


def described(name: str) -> dict[str, Any]:
    """Returns the output of `tfdist NAME --helpjson`, without importing TensorFlow."""
    output, arguments = io.StringIO(), sys.argv[1:]
    sys.argv[1:] = ["--helpjson"]
    try:
        with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # the module may have been imported, under its own name
            runpy.run_module(f"tfdist.{name}", run_name="__main__", alter_sys=True)
    finally:
        sys.argv[1:] = arguments
    description: dict[str, Any] = json.loads(output.getvalue())
    return description
