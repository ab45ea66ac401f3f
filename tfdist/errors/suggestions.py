"""Suggestions in messages about unknown names: the similar names, and the known ones."""

import difflib
from collections.abc import Iterable


def nearest(word: str, known: Iterable[str]) -> str:
    """Returns the end of a message about an unknown name, such as ` Did you mean "mirrored"? Known: mirrored, single.`.

    Args:
      word: the unknown name.
      known: the known names.
    """
    names = sorted(known)
    return f"{did_you_mean(word, names)} Known: {', '.join(names) or 'none'}."


def did_you_mean(word: str, known: Iterable[str], form: str = "{}") -> str:
    """Returns only the question, such as ` Did you mean "mirrored"?`, or "" if no name is similar.

    Args:
      word: the unknown name.
      known: the known names.
      form: format of a suggested name, with `{}` for the name.
    """
    by_lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), by_lower)
    if not close and len(word) > 1:  # such as f1 for f1_score
        close = [name for name in by_lower if name.startswith(word.lower())][:3]
    quoted = " or ".join(f'"{form.format(by_lower[name])}"' for name in close)
    return f" Did you mean {quoted}?" if close else ""
