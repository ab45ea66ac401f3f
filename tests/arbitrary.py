"""Hypothesis strategies for what untrusted clients can send or write: JSON values, and records in which little is wrong."""

from typing import Any

from hypothesis import strategies as st

NUMBERS = st.integers() | st.sampled_from([-1, 0, 1, 2, 3, 2**31, 2**63, 10**400]) | st.floats()
TEXTS = st.text(st.characters(), max_size=12) | st.sampled_from(["\ud800", "x", "y" * 3000, "\n", "start", "0"])
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


def near(record: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Variants of a record in which a few fields have other values, or are missing."""
    changes = st.dictionaries(st.sampled_from(sorted(record)), VALUES, max_size=2)
    return st.builds(
        lambda change, left: {k: v for k, v in {**record, **change}.items() if k not in left},
        changes,
        st.sets(st.sampled_from(sorted(record)), max_size=1),
    )
