"""Lists tfdist's commands: `python -m tfdist`."""

import ast
import pathlib
import sys

from tfdist.errors import ExitCode

USAGE = "python -m tfdist.<command> --help"


def commands() -> dict[str, str]:
    """Returns the first docstring line of each command, by name: the modules in this directory with a main guard.

    They are parsed, not imported, so that the list is shown without delay.
    """
    found = {}
    for path in sorted(pathlib.Path(__file__).parent.glob("*.py")):
        if path.stem.startswith("_"):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if any(_is_main_guard(node) for node in tree.body):
            found[path.stem] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return found


def main(arguments: list[str]) -> int:
    """Prints one line per command.

    Args:
      arguments: command-line arguments after `python -m tfdist`.

    Returns:
      The exit code.
    """
    found = commands()
    unknown = [argument for argument in arguments if argument not in ("-h", "--help")]
    if unknown:
        remedy = f"python -m tfdist.{unknown[0]}" if unknown[0] in found else "python -m tfdist"
        print(f"python -m tfdist takes no arguments. Received: {' '.join(unknown)}. Run `{remedy}`.", file=sys.stderr)
        return ExitCode.BAD_INPUT
    width = max((len(name) for name in found), default=0)
    print(f"Usage: {USAGE}\n")
    for name, summary in found.items():
        print(f"  {name:{width}}  {summary}")
    return ExitCode.DONE


def _is_main_guard(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
