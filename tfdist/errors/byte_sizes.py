"""Numbers of bytes as text."""


def byte_size(count: float) -> str:
    """Returns a number of bytes in the unit that suits it: `512 bytes`, `38.1 MiB`."""
    if count < 1024:
        return f"{count:.0f} bytes"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if count < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} TiB"
