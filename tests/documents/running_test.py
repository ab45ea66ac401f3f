"""A page is read and run: outputs that differ, and commands that fail, are problems."""

import pathlib

import pytest

from tests.documents import blocks, running

PAGE = """\
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


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (PAGE, ["line 4 of a long output with loss 0.4"]),
        (PAGE.replace("loss 0.1", "loss 0.4"), []),
        ("```console\n$ false\n```\n", ["ended with code 1"]),
        ("```console\n$ tfdist ledger\n...\ntfdist ledger: ...\n```\n", []),
    ],
    ids=["it differs", "it is equal", "it fails", "its error is shown"],
)
def test_what_is_wrong_with_a_page(text: str, words: list[str], tmp_path: pathlib.Path):
    page, folder = tmp_path / "page.md", tmp_path / "folder"
    page.write_text(text, encoding="utf-8")
    folder.mkdir()
    problems = [result.problem for result in running.run(blocks.read(page), folder) if result.problem]
    assert len(problems) == len(words) and all(word in problem for word, problem in zip(words, problems, strict=True))
