"""Parses how stale the gradients of a parameter server's workers may be: `sync`, `bounded(4)` or `async`."""

import dataclasses
import re

from tfdist.config.fields import ANY_TEXT, DEVICES, flag_field
from tfdist.errors import InputError
from tfdist.errors.suggestions import nearest

SYNC, BOUNDED, ASYNC = "sync", "bounded", "async"
_KNOWN = (SYNC, f"{BOUNDED}(4)", ASYNC)


@dataclasses.dataclass(frozen=True)
class Staleness:
    """When gradients become updates.

    Attributes:
      kind: "sync", "bounded" or "async".
      bound: maximum staleness of a gradient, in updates, with "bounded"; else None.
    """

    kind: str = SYNC
    bound: int | None = None

    def __str__(self) -> str:
        """Returns a text that `parse_staleness` converts to an equal value."""
        return self.kind if self.bound is None else f"{self.kind}({self.bound})"


def parse_staleness(text: str) -> Staleness:
    """Parses `sync`, `bounded(4)` or `async`.

    Raises:
      InputError: `text` is none of these, or the bound is not a number of at least 0.
    """
    match = re.fullmatch(r"\s*(\w*)\s*(?:\((.*)\))?\s*", text)
    name, argument = (match[1], match[2]) if match else (text, None)
    if name in (SYNC, ASYNC):
        if argument is not None:
            raise InputError(f"{text}: {name} has no arguments. Write {name}")
        return Staleness(name)
    if name != BOUNDED:
        raise InputError(f"{text} is not known.{nearest(name, _KNOWN)}")
    bound = (argument or "").strip()
    if not bound.isdecimal():
        raise InputError(
            f"{text} must have the maximum staleness in updates, a number of at least 0. Write {BOUNDED}(4)"
        )
    return Staleness(BOUNDED, int(bound))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParameterServerOptions:
    """Options of parameter servers."""

    servers: int = flag_field(
        -1,
        DEVICES,
        "Number of processes that hold variables, for --strategy=parameter_server: the last ones of the job; the others train. "
        "0: process 0 does both. -1: as many as TF_CONFIG or `tfdist launch --servers` says, or 1.",
        least=-1,
        is_option=True,
        neutral_values=(-1,),
    )
    staleness: str = flag_field(
        SYNC,
        DEVICES,
        "When gradients become updates, for --strategy=parameter_server: sync (those of all workers together), bounded(4) "
        "(each alone, computed from weights of at most 4 updates before) or async (no bound).",
        parse=parse_staleness,
        is_option=True,
        neutral_values=(SYNC,),
        safe_values=ANY_TEXT,
    )
