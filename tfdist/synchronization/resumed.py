"""Checks that a run resumes with exchanges that can continue those of its checkpoint."""

from collections.abc import Mapping
from typing import Any

from tfdist.errors import InputError
from tfdist.grammar.sync import Periodic


def check_resumed(sync: Periodic, saved: Mapping[str, Any], step: int, *, is_like_ours: bool) -> None:
    """Checks that replicas which have trained locally can continue with a method.

    Their weights differ from each other and from the global ones, in a way that depends on the method: another one would
    take them for equal, or lose what was sent and is not used yet.

    Args:
      sync: how replicas are kept in agreement from now on.
      saved: what `Exchanges.to_json` returned; empty for an unknown run.
      step: number of updates done.
      is_like_ours: whether the method can continue what is saved, if replicas train locally in the next step.

    Raises:
      InputError: they cannot.
    """
    have_trained_locally = saved.get("last_exchange") is not None or bool(saved.get("since"))
    if not have_trained_locally or (is_like_ours and step >= sync.first_local_step):
        return
    raise InputError(
        f"A run must resume with the same method of exchanging weights. Received: sync={sync} at step {step} of a run whose "
        "replicas train locally in another way. Use the `sync` of its run."
    )
