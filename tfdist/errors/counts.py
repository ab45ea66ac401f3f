"""Numbers of things as text."""


def count_of(number: int, name: str) -> str:
    """Returns a number with the singular or the plural of a name: `1 replica`, `8 micro-batches`, `1,200 steps`."""
    plural = "es" if name.endswith(("batch", "process")) else "s"
    return f"{number:,} {name}{'' if number == 1 else plural}"
