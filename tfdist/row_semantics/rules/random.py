"""Random numbers.

Those of rows are other numbers of the same law on each replica. What is drawn once for a batch is drawn with the same seed.
"""

from tfdist.row_semantics.labels import REPLICATED, Rows
from tfdist.row_semantics.rules.elementwise import pointwise
from tfdist.row_semantics.rules.registry import Call, rule
from tfdist.row_semantics.rules.shapes import broadcast
from tfdist.row_semantics.values import NoRuleError, Value


@rule(
    *("RandomUniform", "RandomStandardNormal", "TruncatedNormal", "RandomUniformInt"),
    *(
        f"StatelessRandom{law}{version}"
        for law in "Uniform Normal UniformInt UniformFullInt".split()
        for version in ("", "V2")
    ),
    *("StatelessTruncatedNormal", "StatelessTruncatedNormalV2", "StatelessRandomGammaV3"),
)
def _(call: Call) -> Value:
    shape, *others = call.inputs
    if not all(value.is_replicated for value in others):
        raise NoRuleError("the seed or the bounds of random numbers depend on rows")
    if shape.numbers is not None:
        return broadcast(Value(REPLICATED, ()), tuple(shape.numbers))
    if not shape.is_replicated:
        raise NoRuleError("the shape of random numbers is unknown")
    return Value(REPLICATED)


@rule("StatelessMultinomial", "Multinomial")
def _(call: Call) -> Value:
    logits, *others = call.inputs
    if not all(value.is_replicated for value in others):
        raise NoRuleError("the seed or the number of samples depends on rows")
    label = pointwise([logits])
    if isinstance(label, Rows) and label.axis:
        raise NoRuleError("the distribution depends on several rows")
    return Value(label, (logits.known_dims[0], None))


@rule("RandomShuffle")
def _(call: Call) -> Value:
    if not call.is_replicated:
        raise NoRuleError("rows are shuffled")
    return Value(REPLICATED, call.inputs[0].dims)
