"""Runs a script as if Horovod were not installed: python tests/horovod/without_horovod.py SCRIPT [ARGUMENTS...]."""

import runpy
import sys

sys.modules["horovod"] = None  # type: ignore[assignment]  # makes importing it fail
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
