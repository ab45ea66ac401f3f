"""`tfdist explain`: what the values of a script's step are, and the line that decided it, without training."""

import pathlib
import re
import sys

import pytest

from tfdist import __main__

SCRIPT = """import keras, numpy as np, tensorflow as tf, tfdist
masked = lambda y, x: keras.ops.sum((y - x) ** 2) / keras.ops.sum(y)
gathered, x, y = lambda y, x: keras.ops.mean(tfdist.gather_rows(x)), np.ones((8, 4)), np.ones((8, 1))
def fit(loss): model.compile(loss=loss); model.fit(x, y); raise SystemExit("It was trained.")
with tfdist.load_strategy("single").scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    {}
"""
CASES = {  # expressions that the exit code and what is printed match
    "fit('mse')": "0.*gradient .*/bias  a mean over rows .*All 4 values .*20 bytes.* averaged,.* nothing else is",
    "fit(masked)": "0.*loss/total .* together, by RealDiv in script.py:2  need all .*3 of 4 values.*communicate 2 sums",
    "fit(tfdist.row_semantics.register(rows_to='mean')(masked))": "0.*gradient .*/bias  a mean over rows .* averaged",
    "fit(gathered)": r"0.*, and a step communicates rows \(4 bytes for each row\)\.",
    "tfdist.Trainer(model, optimizer='sgd', loss=masked).fit(x, y)": "0.*by RealDiv in script.py:2 .*communicate 2 sums.*\n$",
    "keras.optimizers.SGD().apply([np.ones(1)], model.weights[1:])": "2.*: script.py, line 7: Only steps of fit.* loop",
    "model.compile(loss='mse', run_eagerly=True); model.fit(x, y)": "2.*: script.py, line 7: .* Received: run_eagerly=True",
    "model.predict(x)": "2.*must call fit, .* Received: script.py, which ended without such a call.",
}


@pytest.mark.smoke("explain")
@pytest.mark.parametrize("code", CASES)
def test_a_script(code: str, tmp_path: pathlib.Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv[:1])
    monkeypatch.setattr(sys, "path", [*sys.path])
    pathlib.Path("script.py").write_text(SCRIPT.format(code), encoding="utf-8")
    with pytest.raises(SystemExit) as ended:
        __main__.main(["explain", "script.py"])
    shown = capsys.readouterr()
    assert re.match(CASES[code], f"{int(ended.value.code)} {shown.out}{shown.err}", re.DOTALL), shown
