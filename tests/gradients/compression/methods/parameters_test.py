"""Parameters of methods: wrong ones are refused in one line, which names the rule and what was received."""

import math

import pytest

from tests.gradients.compression.reducers import method
from tfdist.errors import InputError

REFUSED = [
    *(
        ("dgc", parameters, "dgc.* .*Received: ")
        for parameters in (
            {"ratio": 0},
            {"ratio": 1.5},
            {"ratio": 0.1, "momentum": 1},
            {"ratio": 0.1, "momentum": -0.1},
            {"ratio": 0.1, "momentum": "a"},
            {"ratio": 0.1, "clip_norm": 0},
            {"ratio": 0.1, "clip_norm": math.inf},
            {"ratio": 0.1, "warmup_steps": -1},
            {"ratio": 0.1, "warmup_steps": 1.5},
            {"ratio": 0.1, "warmup_ratio": 0},
            {"ratio": 0.5, "warmup_steps": 10},
        )
    ),
    *(
        ("int8", {"bits": bits}, f"int8 needs bits to be a whole number from 2 to 8. Received: {bits!r}.*bits=2")
        for bits in (1, 9, 4.0, "4", True, None)
    ),
    ("int8", {"block": 0}, "int8 needs block to be a multiple of 8"),
    ("int8", {"block": 100}, "a multiple of 8 .* Received: 100"),
    ("int8", {"stochastic": "yes"}, "int8 needs stochastic=True or False. Received: 'yes'"),
    *(
        ("onebit", {"block": block}, f"onebit needs block to be a multiple of 8 from 8 to .* Received: {block}")
        for block in (0, 7, 12, 2**21, 64.0, True)
    ),
    *(
        ("powersgd", parameters, "powersgd needs .*Received: ")
        for parameters in ({"rank": 0}, {"rank": True}, {"rank": 2.0})
    ),
    *(
        (name, parameters, f"{name} .*Received: ")
        for name in ("projection", "randomk")
        for parameters in ({"ratio": 0}, {"ratio": 2}, {"ratio": None}, {"ratio": 0.1, "unbiased": 1})
    ),
    *(
        ("qsgd", {name: value}, f"qsgd needs {name} to be .* Received: {value}")
        for name, value in (("levels", 0), ("levels", 128), ("block", 4), ("levels", 1.5))
    ),
    *(("sketch", {"columns": columns}, "sketch .*Received: ") for columns in (0, 1.5, "a", True)),
    *(("sketch", {"columns": 9, **more}, "sketch .*Received: ") for more in ({"rows": 0}, {"k": 10}, {"k": 0})),
    *(
        ("terngrad", {"clip": clip}, r"terngrad needs a finite clip above 0\. Received: .*For example, use clip=")
        for clip in (0, -1.0, math.inf, math.nan, True, "2.5")
    ),
    *(
        ("threshold", {"value": value}, "threshold .*Received: ")
        for value in (0, -1.0, math.inf, math.nan, "a", True, None)
    ),
    *(("topk", {"ratio": ratio}, "topk .*Received: ") for ratio in (0, 1.1, -1, "a", True, math.nan)),
    ("topk", {"ratio": 0.1, "method": "fast"}, "topk .*Received: "),
]


@pytest.mark.parametrize(("name", "parameters", "message"), REFUSED)
def test_what_is_refused(name, parameters, message):
    with pytest.raises(InputError, match=message) as caught:
        method(name)(**parameters)
    assert "\n" not in str(caught.value)
