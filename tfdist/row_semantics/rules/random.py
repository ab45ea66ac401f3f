"""Random numbers.

Those of rows are other numbers of the same law on each replica. What is drawn once for a batch is drawn with the same seed.
"""

from tfdist.row_semantics.labels import REPLICATED, Rows
from tfdist.row_semantics.rules.registry import Call, rule
from tfdist.row_semantics.rules.shapes import broadcast
from tfdist.row_semantics.values import NoRuleError, Value


def _drawn(shape: Value) -> Value:
    if shape.numbers is None:
        if shape.is_replicated:
            return Value(REPLICATED)
        raise NoRuleError("the shape of random numbers is unknown")
    return broadcast(Value(REPLICATED, ()), tuple(shape.numbers))


@rule("RandomUniform", "RandomStandardNormal", "TruncatedNormal", "RandomUniformInt")
def _(call: Call) -> Value:
    shape, *others = call.inputs
    return _checked(call, shape, others)


@rule(
    "StatelessRandomUniformV2",
    "StatelessRandomNormalV2",
    "StatelessTruncatedNormalV2",
    "StatelessRandomUniformIntV2",
    "StatelessRandomUniformFullIntV2",
    "StatelessRandomUniform",
    "StatelessRandomNormal",
    "StatelessTruncatedNormal",
    "StatelessRandomUniformInt",
)
def _(call: Call) -> Value:
    shape, *others = call.inputs
    return _checked(call, shape, others)


@rule(
    "StatefulUniform",
    "StatefulStandardNormalV2",
    "StatefulTruncatedNormal",
    "StatefulUniformInt",
    "StatefulUniformFullInt",
)
def _(call: Call) -> Value:
    _, algorithm, shape, *others = call.inputs
    return _checked(call, shape, [algorithm, *others])


def _checked(call: Call, shape: Value, others: list[Value]) -> Value:
    if not all(value.is_replicated for value in others):
        raise NoRuleError("the seed or the bounds of random numbers depend on rows")
    return _drawn(shape)


@rule("StatelessMultinomial", "Multinomial")
def _(call: Call) -> Value:
    logits, *others = call.inputs
    if (
        isinstance(logits.label, Rows)
        and not (logits.label.axis or logits.label.power)
        and all(v.is_replicated for v in others)
    ):
        return Value(Rows(0, logits.label.size), (logits.label.size, None))
    if all(value.is_replicated for value in call.inputs):
        return Value(REPLICATED)
    raise NoRuleError("the distribution depends on several rows")


@rule("RandomShuffle")
def _(call: Call) -> Value:
    if not call.inputs[0].is_replicated:
        raise NoRuleError("rows are shuffled")
    return Value(REPLICATED, call.inputs[0].dims)
