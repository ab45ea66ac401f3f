"""The methods that `--compression` names; does not import TensorFlow."""

from tfdist.grammar.rules import parse_rules

OF_GRADIENTS = ("signsgd", "dgc")  # what they send has no size, or a momentum of its own: it is for an optimizer


def is_chosen(text: str) -> bool:
    """Returns whether methods are chosen by measurement: `auto`; `text` as in `--compression`."""
    return "auto" in _names(text)


def is_for_gradients(text: str) -> bool:
    """Returns whether a method is for gradients only, so that weights cannot be exchanged by it; `text` as `--compression`."""
    return not _names(text).isdisjoint(OF_GRADIENTS)


def _names(text: str) -> set[str]:
    return {method.name for rule in parse_rules(text) for method in rule.methods}
