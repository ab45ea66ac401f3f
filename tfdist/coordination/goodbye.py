"""The goodbye of a process to its groups: with which exit code it ends, and why."""

import functools
import os
import signal
import weakref
from typing import Protocol

from tfdist.errors import ExitCode, TfdistError, exit_codes
from tfdist.errors.engine_errors import described
from tfdist.process import exit_status


class Member(Protocol):
    """A member of a group, which can leave it."""

    def leave(self, code: int, reason: str) -> None:
        """See `Group.leave`."""


_members: weakref.WeakSet[Member] = weakref.WeakSet()
os.register_at_fork(after_in_child=_members.clear)  # the connections are those of the parent


def leave_at_failure(member: Member) -> None:
    """Makes a member leave its group when this process ends with a failure, even if its threads do not let it end."""
    _members.add(member)
    _register()


@functools.cache
def _register() -> None:
    exit_status.at_end(_leave_all)


def _leave_all(error: BaseException) -> None:
    code, reason = goodbye_of(error)
    if not is_planned(code):
        for member in [*_members]:
            member.leave(code, reason)


def is_planned(code: int) -> bool:
    """Returns whether a process that ends with this code is no loss for the others, which end as well."""
    return code in (ExitCode.DONE, ExitCode.PREEMPTED)


def goodbye_of(error: BaseException | None) -> tuple[int, str]:
    """Returns the exit code of a process that an exception ends, and the reason.

    Args:
      error: the exception; None if the process ends without one.
    """
    if error is None:
        return ExitCode.DONE, ""
    if isinstance(error, TfdistError):
        return error.exit_code, str(error)
    if isinstance(error, KeyboardInterrupt):
        return exit_codes.SIGNALLED + signal.SIGINT, ""
    if isinstance(error, SystemExit):
        code = error.code
        return (int(code) & 0xFF if isinstance(code, int) else int(code is not None)), ""  # as the process ends with
    return ExitCode.FAILED, described(error)
