"""Operations without a result that counts."""

from tfdist.row_semantics.labels import REPLICATED
from tfdist.row_semantics.rules.registry import Call, rule
from tfdist.row_semantics.values import NoRuleError, Value


@rule(
    "NoOp",
    "Assert",
    "PrintV2",
    "StringFormat",
    "ControlTrigger",
    "CheckNumericsV2",
    "WriteScalarSummary",
    "WriteSummary",
)
def _(call: Call) -> list[Value]:
    return [Value(REPLICATED) for _ in call.operation.outputs]


@rule(
    "VarHandleOp",
    "Empty",
    "StatelessRandomGetKeyCounter",
    "StatelessRandomGetKeyCounterAlg",
    "StatelessRandomGetAlg",
    "StatelessRandomGetKey",
)
def _(call: Call) -> list[Value]:
    if not all(value.is_replicated for value in call.inputs):
        raise NoRuleError("a seed depends on rows")
    return [Value(REPLICATED) for _ in call.operation.outputs]
