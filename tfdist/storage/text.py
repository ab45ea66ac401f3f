"""Text files that users name."""

from tfdist.errors import InputError
from tfdist.storage.path import AnyPath
from tfdist.storage.registry import path_of, storage_of


def text_of(file: AnyPath) -> str:
    """Returns the text of a file that a user names; a link to a regular file is followed.

    Raises:
      OSError, UnicodeDecodeError: there is no such file, or it is not text.
    """
    path = path_of(file)
    storage = storage_of(path)
    return storage.read(storage.resolved(path)).decode()


def read_text(file: AnyPath, rule: str, remedy: str = "") -> str:
    """Returns the text of a file.

    Args:
      file: path or URL.
      rule: what the file must be, as a sentence, for the error.
      remedy: what to do otherwise, as a sentence; empty for none.

    Raises:
      InputError: there is no such file, or it is not text.
    """
    try:
        return text_of(file)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        end = f". {remedy}" if remedy else ""
        raise InputError(f"{rule} Received: {file}: {reason}{end}") from error
