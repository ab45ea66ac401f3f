"""A notebook as a page: its text, its code, and the outputs that are stored in it."""

import json
import pathlib
import re


def text(path: pathlib.Path) -> str:
    """Returns the page's Markdown."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join(_cell(cell) for cell in cells) + "\n"


def _cell(cell: dict) -> str:
    source = "".join(cell["source"])
    if cell["cell_type"] != "code":
        return source
    return "\n\n".join([f"```python\n{source}\n```", *filter(None, map(_output, cell["outputs"]))])


def _output(output: dict) -> str:
    if output["output_type"] == "stream":
        return _printed("".join(output["text"]))
    data = output["data"]
    if "image/png" in data:
        alternative = re.sub(r"[<>]", "", "".join(data.get("text/plain", "picture")))
        return f"![{alternative}](data:image/png;base64,{''.join(data['image/png'].split())})"
    return _printed("".join(data["text/plain"]))


def _printed(lines: str) -> str:
    return f"```text\n{lines.rstrip()}\n```"
