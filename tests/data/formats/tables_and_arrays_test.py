"""Tables in CSV files, and arrays in .npz files."""

import gzip
import textwrap
import zipfile

import numpy as np
import pytest

from tests.data.reading import everything
from tfdist.data import load
from tfdist.data.array_files import _make_table
from tfdist.errors import InputError

FLOWERS = """
    width,color,height,species
    1.0,red,2,rose
    2.5,blue,4,iris
    3.0,"red",6,iris
    4.5,white,8,rose
"""


def written(folder, text, name="flowers.csv"):
    (folder / name).write_text(textwrap.dedent(text).lstrip())
    return f"csv:{folder / name}"


def test_numbers_categories_and_classes(tmp_path):
    found = load(written(tmp_path, FLOWERS) + '(label="species")')
    assert (found.input_shape, found.classes, found.class_names) == ((5,), 2, ("iris", "rose"))
    x, y = everything(found.train)
    assert (x.dtype, y.dtype) == (np.float32, np.int32)
    colors = [[0, 1, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]]  # blue, red, white
    np.testing.assert_array_equal(x, np.c_[[1, 2.5, 3, 4.5], colors, [2, 4, 6, 8]])
    np.testing.assert_array_equal(y, [1, 0, 0, 1])


def test_columns_by_number_without_a_header(tmp_path):
    rows = "\n".join(f"{i};{i * i};{10 + i % 2}" for i in range(6))
    (tmp_path / "rows.csv.gz").write_bytes(gzip.compress(rows.encode(), mtime=0))
    found = load(f'csv:{tmp_path}/rows.csv.gz(header=False, delimiter=";", label=-1, drop=(1,))')
    x, y = everything(found.train)
    np.testing.assert_array_equal(x, np.arange(6.0)[:, None])
    np.testing.assert_array_equal(y, [0, 1] * 3)
    assert found.class_names == ("10", "11")


def test_numbers_to_predict(tmp_path):
    found = load(written(tmp_path, FLOWERS) + '(label="height", regression=True, drop="species")')
    assert found.classes is None
    _, y = everything(found.train)
    assert y.dtype == np.float32 and y.tolist() == [2, 4, 6, 8]


def test_a_second_file_is_encoded_as_the_first(tmp_path):
    test = """
        species,height,color,width
        rose,1,green,7
        iris,3,red,9
    """
    written(tmp_path, test, "test.csv")
    written(tmp_path, FLOWERS)
    found = load('csv:flowers.csv(label="species", test="test.csv", standardize=True)', data_dir=str(tmp_path))
    x, _ = everything(found.train)
    np.testing.assert_allclose(x[:, [0, 4]].mean(axis=0), 0, atol=1e-6)
    np.testing.assert_allclose(x[:, [0, 4]].std(axis=0), 1, rtol=1e-6)
    assert found.test
    x, y = everything(found.test)
    width, height = np.array([1, 2.5, 3, 4.5]), np.array([2, 4, 6, 8])
    np.testing.assert_allclose(x[:, 0], (np.array([7, 9]) - width.mean()) / width.std(), rtol=1e-6)
    np.testing.assert_allclose(x[:, 4], (np.array([1, 3]) - height.mean()) / height.std(), rtol=1e-6)
    np.testing.assert_array_equal(x[:, 1:4], [[0, 0, 0], [0, 1, 0]])  # green is unknown
    np.testing.assert_array_equal(y, [1, 0])


def test_what_is_learned_is_learned_from_the_training_part(tmp_path):
    rows = "".join(f"{i},{i % 2}\n" for i in range(20))
    found = load(written(tmp_path, "a,y\n" + rows) + '(label="y", validation_split=0.2, standardize=True)')
    assert found.test and (found.train.size, found.test.size) == (16, 4)
    x, y = everything(found.train)
    np.testing.assert_allclose([x.mean(), x.std()], [0, 1], atol=1e-6)
    assert np.bincount(y).tolist() == [8, 8]


def test_rows_without_values(tmp_path):
    name = written(tmp_path, "a,b,y\n1,x,0\n,x,1\n3,NA,1\n4,x,0\n")
    with pytest.raises(InputError, match="a missing value in column 'a', line 3 of .*drop_missing=True"):
        load(f'{name}(label="y")')
    assert load(f'{name}(label="y", drop="a")').input_shape == (2,)  # NA is a category
    x, _ = everything(load(f'{name}(label="y", drop_missing=True)').train)
    np.testing.assert_array_equal(x, [[1, 1], [4, 1]])


@pytest.mark.parametrize(
    ("text", "arguments", "says"),
    [
        (FLOWERS, "", "needs the column of the label.*one of 'width', 'color', 'height', 'species'"),
        (FLOWERS, '(label="specis")', 'label must be a column of .*Did you mean "species"'),
        (FLOWERS, "(label=9)", "label must be a column"),
        (FLOWERS, '(label="species", drop=("colour",))', 'drop must be a column of .*Did you mean "color"'),
        (FLOWERS, '(label="width")', "fractions in column 'width'.*regression=True"),
        (FLOWERS, '(label="species", regression=True)', "must have a number.*'rose' in column 'species', line 2"),
        (FLOWERS, '(label="species", test="other.csv")', "there is no file other.csv"),
        (FLOWERS, '(label="species", test="x.csv", validation_split=0.5)', "mutually exclusive"),
        (FLOWERS, '(label="species", delimiter=";;")', "delimiter must be one character"),
        (
            FLOWERS,
            '(label="species", drop=("width", "color", "height"))',
            "needs a label and at least one other column",
        ),
        ("a,b\n1,2\n3\n", '(label="b")', "line 3: 1 values instead of 2"),
        ("a,a\n1,2\n", '(label="a")', "'a' twice"),
        ("", '(label="a")', "is empty"),
        ("a,b\n", '(label="a")', "only a line of column names"),
        ("a,b\n1,2\ninf,3\n", '(label="b")', "'inf' in column 'a', line 3"),
        ("a,b\n" + "".join(f"id{i},0\n" for i in range(101)), '(label="b")', r"101 in column 'a'.*drop=\('a',\)"),
        ("a,b\n,\n", '(label="b", drop_missing=True)', "value in each column. Received no such row"),
    ],
)
def test_what_is_no_such_table_is_an_error(tmp_path, text, arguments, says):
    with pytest.raises(InputError, match=says) as error:
        load(written(tmp_path, text) + arguments)
    assert "\n" not in str(error.value)


def test_reading_is_linear_in_the_columns(tmp_path):
    class Name(str):
        __hash__, compared = str.__hash__, 0

        def __eq__(self, other):
            Name.compared += 1
            return str.__eq__(self, other)

    names = [Name(number) for number in range(1000)]
    table = _make_table("wide.csv", iter([(1, names), (2, ["0"] * 1000)]), header=True)
    assert [table.column(name, "label") for name in names] == names
    assert Name.compared < 10_000


def test_a_file_that_is_no_text_is_an_error(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"a,b\n\xff\xfe,2\n")
    with pytest.raises(InputError, match="readable UTF-8 text. Received: .*a.csv"):
        load(f'csv:{tmp_path}/a.csv(label="b")')
    flipped = bytearray(gzip.compress(FLOWERS.encode() * 9))
    flipped[20] ^= 255
    (tmp_path / "a.csv.gz").write_bytes(flipped)
    with pytest.raises(InputError, match="readable UTF-8 text. Received: .*a.csv.gz: Error -3"):
        load(f'csv:{tmp_path}/a.csv.gz(label="b")')


def test_labels_of_the_test_part_must_be_known(tmp_path):
    written(tmp_path, FLOWERS.replace("iris", "lily"), "test.csv")
    name = written(tmp_path, FLOWERS)
    words = "occur in the training data. Received: 'lily' in column 'species' of .*test.csv"
    with pytest.raises(InputError, match=words):
        load(f'{name}(label="species", test="{tmp_path}/test.csv")')


def test_rows_know_their_lines(tmp_path):
    (tmp_path / "t.csv").write_text("a,label\n1,0\n,0\n\n3,1\n4,0\n5,1\n")
    found = load(f"csv:{tmp_path}/t.csv(label='label', drop_missing=True, validation_split=0.5)")
    both = found.train, found.test
    parts = [(part.origins, part.fetch(range(part.size))[0].numpy()[:, 0].tolist()) for part in both]
    line_of = {1.0: 2, 3.0: 5, 4.0: 6, 5.0: 7}
    for origins, values in parts:
        assert origins.kind == "line" and origins.names == [line_of[value] for value in values]


X = np.arange(20, dtype=np.float64).reshape(10, 2)
Y = np.arange(10) % 3


def saved(folder, **arrays):
    np.savez(folder / "data.npz", **arrays)
    return f"npz:{folder / 'data.npz'}"


def test_x_and_y(tmp_path):
    found = load(saved(tmp_path, x=X, y=Y))
    assert (found.input_shape, found.classes, found.test) == ((2,), 3, None)
    x, y = everything(found.train)
    assert (x.dtype, y.dtype) == (np.float32, np.int32)
    np.testing.assert_array_equal(x, X)
    np.testing.assert_array_equal(y, Y)


def test_the_files_of_keras(tmp_path):
    images = np.full((10, 4, 4), 51, np.uint8)
    name = saved(tmp_path, x_train=images, y_train=Y[:, None], x_test=images[:4], y_test=Y[:4])
    found = load(name)
    assert found.input_shape == (4, 4, 1) and found.classes == 3
    assert found.test and (found.train.size, found.test.size) == (10, 4)
    x, y = everything(found.test)
    np.testing.assert_allclose(x, np.full((4, 4, 4, 1), 0.2))
    np.testing.assert_array_equal(y, Y[:4])
    with pytest.raises(
        InputError, match="Test data and validation_split are mutually exclusive. Received: .*data.npz and 0.5"
    ):
        load(f"{name}(validation_split=0.5)")


def test_a_validation_split(tmp_path):
    found = load(f"{saved(tmp_path, x=X, y=Y)}(validation_split=0.3)")
    assert found.test and (found.train.size, found.test.size) == (7, 3)
    both = np.concatenate([everything(found.train)[0], everything(found.test)[0]])
    np.testing.assert_array_equal(both[np.argsort(both[:, 0])], X)


@pytest.mark.parametrize(
    ("y", "classes", "names"),
    [(np.array(["b", "a"] * 5), 2, ("a", "b")), (X[:, 0] / 3, None, ()), (np.eye(10)[:, :4], None, ())],
)
def test_forms_of_labels(tmp_path, y, classes, names):
    found = load(saved(tmp_path, x=X, y=y))
    assert (found.classes, found.class_names) == (classes, names)
    if names:
        np.testing.assert_array_equal(everything(found.train)[1], [1, 0] * 5)


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"a": X}, "must have arrays x and y.*Received: .*data.npz with a"),
        ({"x": X}, "with x but without y"),
        ({"x_train": X, "y_train": Y, "x_test": X}, "without y_test"),
        ({"x": X, "y": Y[:3]}, r"same first dim.*\[10, 2\] and y of shape \[3\]"),
        ({"x": X[:0], "y": Y[:0]}, "at least 1"),
        ({"x": np.array(["a"] * 10), "y": Y}, "x must be numeric"),
        ({"x": np.array([None] * 10), "y": Y}, "cannot be read"),
        ({"x": X, "y": Y - 1}, "Integer labels must be at least 0. Received: -1"),
        ({"x_train": X, "y_train": Y, "x_test": X[:, :1], "y_test": Y}, "shape of the training examples"),
        ({"x_train": X, "y_train": np.array(["a"] * 10), "x_test": X, "y_test": np.array(["b"] * 10)}, "'b'"),
    ],
)
def test_other_arrays_are_errors(tmp_path, arrays, says):
    with pytest.raises(InputError, match=says) as error:
        load(saved(tmp_path, **arrays))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda c: {6: 1, c.index(b"PK\1\2") + 8: 1}, "encrypted"),
        (lambda c: {8: 99, c.index(b"PK\1\2") + 10: 99}, "not supported"),
        (lambda c: {30 + c[26] + c[28]: 255}, "Error -3"),  # the first compressed byte
    ],
)
def test_a_damaged_archive_is_an_error(tmp_path, damage, says):
    np.savez_compressed(tmp_path / "data.npz", x=np.random.default_rng(0).random((100, 2)), y=np.zeros(100, np.int32))
    content = bytearray((tmp_path / "data.npz").read_bytes())
    for place, value in damage(content).items():
        content[place] = value
    (tmp_path / "data.npz").write_bytes(content)
    with pytest.raises(InputError, match=f"data.npz, which cannot be read: .*{says}"):
        load(f"npz:{tmp_path / 'data.npz'}")


def test_a_false_shape_is_no_lack_of_memory(tmp_path):
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (9999999999999999,), }\n"
    with zipfile.ZipFile(tmp_path / "data.npz", "w") as archive:
        for name in ("x.npy", "y.npy"):
            archive.writestr(name, b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    with pytest.raises(InputError, match="data.npz, which cannot be read: Unable to allocate"):
        load(f"npz:{tmp_path / 'data.npz'}")


def test_a_file_that_is_no_archive_is_an_error(tmp_path):
    np.save(tmp_path / "one.npy", X)
    with pytest.raises(InputError, match="it is a single array"):
        load(f"npz:{tmp_path}/one.npy")
    with pytest.raises(InputError, match='there is no file on.npy in .*Did you mean "one.npy"'):
        load(f"npz:{tmp_path}/on.npy")
