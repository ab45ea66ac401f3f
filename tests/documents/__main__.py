"""Runs the commands and programs of pages, and compares what they print with what the pages show.

python -m tests.documents docs/tutorial.md README.md
python -m tests.documents --update docs/tutorial.md    writes the new outputs into the page
"""

import argparse
import pathlib
import sys
import tempfile

from tests.documents import blocks, running, updating


def main() -> int:
    """Runs the pages; returns 1 if one differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.documents", description=__doc__.partition("\n")[0])
    parser.add_argument("--update", action="store_true", help="write outputs that differ into the page")
    parser.add_argument("pages", nargs="+", type=pathlib.Path)
    options = parser.parse_args()
    failed = False
    for page in options.pages:
        results = []
        with tempfile.TemporaryDirectory(prefix="documents-") as folder:
            for result in running.run(blocks.read(page), pathlib.Path(folder)):
                results.append(result)
                verdict = "differs" if result.problem else "ok"
                first = result.step.text.partition("\n")[0]
                print(f"{verdict:8} {result.seconds:6.1f} s  {page}:{result.block.line}  {first}", flush=True)
                if result.problem and not options.update:
                    print(f"  {result.problem}".replace("\n", "\n  "), flush=True)
        if options.update:
            for command in updating.update(page, results):
                print(f"updated  {command}")
        failed |= any(result.problem for result in results)
    return int(failed and not options.update)


if __name__ == "__main__":
    sys.exit(main())
