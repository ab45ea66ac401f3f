"""The progress of `Trainer.fit` on the terminal, unless the caller reports it elsewhere."""

import contextlib
import dataclasses
import sys
from collections.abc import Iterator

from tfdist.errors import InputError, describe_error
from tfdist.reporting import PlainReporter, Reporter, terminal_or_plain
from tfdist.row_semantics.explanation import listener
from tfdist.trainer.options import Reporting

_VERBOSE = ("auto", 0, 1, 2)


@contextlib.contextmanager
def reported(reporting: Reporting, verbose: int | str, is_chief: bool) -> Iterator[Reporting]:
    """Context in which a run is reported as `Trainer.fit` documents for `verbose`.

    Args:
      reporting: where the caller records the run; its reporter stays if there is one.
      verbose: "auto", 0, 1 or 2.
      is_chief: whether this process writes to the terminal.

    Raises:
      InputError: `verbose` is something else.
    """
    if verbose not in _VERBOSE:
        raise InputError(f"`verbose` must be one of 'auto', 0, 1 and 2. Received: {verbose!r}.")
    if not verbose or not is_chief or listener() or type(reporting.reporter) is not Reporter:
        yield reporting
        return
    reporter = PlainReporter(sys.stderr) if verbose == 2 else terminal_or_plain(sys.stderr)
    try:
        yield dataclasses.replace(reporting, reporter=reporter)
    except BaseException as error:
        reporter.close(describe_error(error))
        raise
    reporter.close("")
