"""Tests of `tfdist.parameter_server.table_rows`; `variable_server_test` has those of updates."""

import keras
import numpy as np
import pytest

from tfdist import keras_internals
from tfdist.parameter_server import table_rows
from tfdist.parameter_server.table_rows import TableRows, TableSpec, blocks, count_rows, split, sum_rows


@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("rows", [3, 10, 11])
def test_each_row_is_on_one_server(rows, servers):
    places, ids = zip(*split(np.arange(rows), servers), strict=True)
    assert sorted(np.concatenate(places)) == list(range(rows))
    assert [own.tolist() for own in ids] == [[*range(count_rows(rows, server, servers))] for server in range(servers)]
    assert max(map(len, places)) - min(map(len, places)) <= 1


def test_rows_of_one_id_are_summed_in_the_order_of_shares():
    first, second = (np.array([2, 9]), np.array([[1e16], [1.0]])), (np.array([1, 2]), np.array([[5.0], [-1e16]]))
    ids, rows = sum_rows([first, second, (np.array([2]), np.array([[1.0]]))])
    assert ids.tolist() == [1, 2, 9] and rows.ravel().tolist() == [5.0, 1.0, 1.0]


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_servers_draw_the_rows_of_one_device(servers, dtype, monkeypatch):
    monkeypatch.setattr(table_rows, "_BLOCK_BYTES", 300)  # several blocks
    with keras_internals.deferred_weights():
        layer = keras.layers.Embedding(50, 5, dtype=dtype)
        layer.build()
    [variable] = layer.weights
    initializer = keras_internals.rows_initializer(variable)
    spec = TableSpec("embedding/embeddings", (50, 5), dtype, initializer)
    expected = keras_internals.initial_value(variable).numpy()
    assert len(list(blocks((50, 5), dtype))) > 1
    for server in range(servers):
        np.testing.assert_array_equal(TableRows(spec, server, servers).variable.numpy(), expected[server::servers])
