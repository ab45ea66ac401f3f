"""A page is read, run and updated: only the outputs that differ change, and lines that it leaves out stay out."""

import pathlib
import subprocess
import sys

PAGE = """\
# Page

Programs with a title are files.

```python title="count.py"
for number in range(5):
    print(f"line {number} of a long output with loss {number / 10}")
print("end")
```

- In a list:

  ```console
  $ python count.py
  ...
  line 4 of a long output with loss 0.1
  end
  $ echo kept \\
      on two lines
  kept on two lines
  ```

<!-- not run: it would fail -->
```bash
false
```

<!-- first: touch made -->
```bash
# A comment.
export WHERE=made
cd examples
```

```console
$ ls ../$WHERE
../made
```

```python
print(1)
```
"""


def run(page: pathlib.Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.documents", *options, str(page)]
    root = pathlib.Path(__file__).parents[2]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL)


def test_the_page_differs_until_it_is_updated(tmp_path: pathlib.Path):
    page = tmp_path / "page.md"
    page.write_text(PAGE, encoding="utf-8")
    checked = run(page)
    assert checked.returncode == 1 and checked.stdout.count("differs  ") == 1, checked.stdout + checked.stderr
    assert "line 4 of a long output with loss 0.4" in checked.stdout
    updated = run(page, "--update")
    assert updated.returncode == 0 and "updated  python count.py" in updated.stdout
    assert page.read_text(encoding="utf-8") == PAGE.replace("loss 0.1", "loss 0.4")
    assert run(page).returncode == 0


def test_a_command_that_fails_is_a_problem(tmp_path: pathlib.Path):
    page = tmp_path / "page.md"
    page.write_text("```console\n$ false\n```\n", encoding="utf-8")
    assert "ended with code 1" in run(page).stdout
    page.write_text("```console\n$ tfdist ledger\n...\ntfdist ledger: ...\n```\n", encoding="utf-8")
    checked = run(page)
    assert checked.returncode == 0, checked.stdout
