"""Operations without a result that counts."""

from tfdist.row_semantics.rules.registry import Call, rule
from tfdist.row_semantics.values import REPLICATED, Value


@rule("NoOp", "Assert", "PrintV2", "ControlTrigger", "WriteScalarSummary", "WriteSummary", "VarIsInitializedOp")
def _(call: Call) -> list[Value]:
    return [Value(REPLICATED) for _ in call.operation.outputs]
