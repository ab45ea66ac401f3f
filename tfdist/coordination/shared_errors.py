"""Errors of one process of a job that the others must learn of: they would wait for it in their next call."""

import contextlib
from collections.abc import Iterator

from tfdist.coordination.group import Group, Json, name_member
from tfdist.coordination.timeouts import long_timeout
from tfdist.errors import InputError, PeerLostError, Preempted
from tfdist.errors.engine_errors import described, one_line

_LONGEST = 1000  # characters of an error


@contextlib.contextmanager
def refused_together(group: Group, name: str) -> Iterator[None]:
    """Context that raises on all members of a group if its body raises on some of them; every member must enter it.

    Processes with different parts of a model may refuse what others accept. The body must not wait for members that may not
    arrive, because of an error in their bodies, at what it waits for.

    Args:
      group: the members.
      name: names the operation, the same on every member.

    Raises:
      InputError: another member has refused its input, with its message; or any other error in its values or types.
      PeerLostError: another member has failed otherwise.
    """
    try:
        yield
    except (PeerLostError, Preempted):  # of which the others learn by themselves
        raise
    except Exception as error:
        with contextlib.suppress(PeerLostError):
            _gathered(group, name, _described(error))
        raise
    everyone = _gathered(group, name, None)
    for member, found in enumerate(everyone):
        if found:
            raise _raised_by(group, member, *found)


def _gathered(group: Group, name: str, mine: Json) -> list[Json]:
    with long_timeout("its part of the model") as deadline:
        return group.gather(f"refused/{name}", mine, deadline)


def _described(error: Exception) -> list[str]:
    """Returns the kind of an error, and its message in one line."""
    if isinstance(error, InputError):
        return ["InputError", one_line(str(error))[:_LONGEST]]
    kind = "ValueError" if isinstance(error, ValueError | TypeError) else "Exception"
    return [kind, described(error)]


def _raised_by(group: Group, member: int, kind: str, text: str) -> Exception:
    rank = group.ranks[member]
    where = f"{name_member(rank)}{group.role(rank)}"
    if kind == "InputError":
        return InputError(text)
    if kind == "ValueError":
        text = text.rstrip(".")
        return InputError(
            f"Every process must accept its part of the model. Received on {where}: {text}. Change the model or the data."
        )
    return PeerLostError(f"{where} has failed: {text}")
