"""Runs commands that must be answered without TensorFlow, one after the other in this process.

Reads a JSON list of [environment, arguments] from standard input; writes a list of [exit code, output, errors, modules].
"""

import contextlib
import io
import json
import os
import sys
import warnings

from tfdist import __main__ as main

SLOW = ("tensorflow", "keras")


def run(environment, arguments):
    before, argv = dict(os.environ), sys.argv
    os.environ.update(environment)
    sys.argv = ["tfdist", *arguments]
    out, err = io.StringIO(), io.StringIO()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            # Tests that ran before in this process may have imported a command's module.
            warnings.filterwarnings("ignore", ".* found in sys.modules after import", RuntimeWarning)
            code = main.main(arguments)
    except SystemExit as end:
        code = end.code
    finally:
        sys.argv = argv
        os.environ.clear()
        os.environ.update(before)
    return [code, out.getvalue(), err.getvalue(), [name for name in SLOW if name in sys.modules]]


if __name__ == "__main__":
    found = [run(*use) for use in json.load(sys.stdin)]
    print(json.dumps(found))
