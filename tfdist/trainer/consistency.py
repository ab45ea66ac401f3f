"""What all ranks have alike before they train: the code, the versions, the model and its optimizer; what differs is named.

A rank with another model would wait for ever in a collective that no other rank enters, or worse, add up what does not belong
together. Only hashes travel as long as all is well.
"""

import contextlib
import functools
import hashlib
import json
import pathlib
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import keras

from tfdist import keras_internals
from tfdist.coordination import Group
from tfdist.coordination.timeouts import long_timeout
from tfdist.distribution.variable_creation import without_numbers
from tfdist.grammar.unique_names import unique_names
from tfdist.reporting.environment import versions

_PIECE = 200  # entries in one message of the group
_LONGEST = 500  # characters of a value that are compared as they are
_PRIVATE = ("name", "seed", "input_layers", "output_layers")  # settings of a layer that Keras counts or draws


def check_alike(group: Group, model: keras.Model) -> None:
    """Compares over all ranks what training rests on, before a variable is sent.

    Args:
      group: of all ranks that train.
      model: built; its optimizer, too, if it is compiled.

    Raises:
      InputError: on every rank, naming the first thing that differs, and who has what.
    """
    agree(group, "version of ", versions())
    agree(group, "the code of ", own_code(), common=True)
    agree(group, "", described(model))


def agree(group: Group, what: str, mine: Mapping[str, str], *, common: bool = False) -> None:
    """As `Group.agree`, for any number of entries, and the first that differs is that of rank 0's order.

    Args:
      group: of all ranks.
      what: stands before a key in the message.
      mine: what must be the same.
      common: whether an entry may be missing on a rank.

    Raises:
      InputError: an entry differs.
    """
    whole = hashlib.sha256(json.dumps([*mine.items()]).encode()).hexdigest()
    with long_timeout("its model") as deadline:
        everyone = group.gather(f"alike/{what}whole", whole, deadline)
    if len(set(everyone)) == 1:
        return
    theirs = dict(_of_rank_0(group, what, mine))
    order = {key: number for number, key in enumerate([*theirs, *(key for key in mine if key not in theirs)])}
    both = theirs.keys() & mine.keys() if common else order.keys()
    first = next((key for key in order if key in both and theirs.get(key) != mine.get(key)), None)
    found = [said for said in group.gather(f"alike/{what}first", first and [order[first], first]) if said]
    if found:
        key = min(found)[1]
        group.agree(f"alike/{what}differs", {key: mine[key]} if key in mine else {}, what)


def _of_rank_0(group: Group, what: str, mine: Mapping[str, str]) -> Iterator[list[str]]:
    """Rank 0's entries, on every rank; in pieces, as a message has a limit."""
    entries = [*mine.items()]
    pieces = [entries[start : start + _PIECE] for start in range(0, len(entries), _PIECE)]
    for number in range(group.broadcast(f"alike/{what}pieces", len(pieces))):
        yield from group.broadcast(f"alike/{what}{number}", pieces[number] if group.rank == 0 else None)


@functools.cache
def _hash(file: str) -> str:
    """Of a file when it was first asked for: what is changed later is not what runs."""
    return hashlib.sha256(pathlib.Path(file).read_bytes()).hexdigest()[:16]


def own_code() -> dict[str, str]:
    """A hash of the file of each module that is loaded, of the user's own and of tfdist, by the file's and module's names.

    What is installed has versions in place of that.
    """
    found = {}
    libraries = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
    for name, module in sorted(sys.modules.items()):
        # Not by `getattr`, at which a module that loads itself when it is used would do so.
        file = getattr(module, "__dict__", {}).get("__file__") or ""
        installed = file.startswith(libraries) or {"site-packages", "dist-packages"} & set(file.split("/"))
        if file.endswith(".py") and (name.partition(".")[0] == "tfdist" or not installed):
            with contextlib.suppress(OSError):  # a file that is gone, or in an archive
                found[f"{pathlib.Path(file).name} (module {name})"] = _hash(file)
    return found


def described(model: keras.Model) -> dict[str, str]:
    """A model and its optimizer in words: each variable's form, and the settings of each layer that are numbers or words.

    Names stand without the numbers by which Keras counts what a process has made.
    """
    optimizer = getattr(model, "optimizer", None)
    variables = [*model.variables, *(optimizer.variables if optimizer is not None else [])]
    forms = [(f"variable {without_numbers(v.path)}", f"{v.dtype}{list(v.shape)}") for v in variables]
    parts = [("layer", layer) for layer in keras_internals.layers_of(model)]
    parts += [("optimizer", optimizer)] if optimizer is not None else []
    settings = [entry for kind, part in parts for entry in _settings(f"{kind} {without_numbers(part.name)}", part)]
    return unique_names([*forms, *settings], mark=" #")


def _settings(title: str, part: Any) -> Iterator[tuple[str, str]]:
    yield f"{title}: class", type(part).__name__
    config: Any = {}
    with contextlib.suppress(Exception):  # a user's own, which may not know what it is made of
        config = part.get_config()
    yield from _flat(f"{title}: ", {key: value for key, value in config.items() if key not in _PRIVATE})


def _flat(title: str, config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The numbers, words and lists of them in a configuration; a lambda's code has its file's path in it."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value.get("class_name") == "__lambda__":
            continue
        if isinstance(value, Mapping):
            yield from _flat(f"{title}{key}.", value)
        elif all(isinstance(one, (str, int, float, type(None))) for one in _listed(value)):
            yield f"{title}{key}", str(value)[:_LONGEST]


def _listed(value: Any) -> Iterable[Any]:
    return value if isinstance(value, (list, tuple)) else [value]
