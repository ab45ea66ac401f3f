"""Parameter servers: processes that hold variables and update them with the gradients that workers push.

`coordinator` orders updates by the rules of `update_order`, and `variable_server` applies them. Workers access variables
through `remote_variables` and `embedding_tables`; servers store tables as `table_rows`. They communicate by
`tfdist.coordination.calls`, with compressed gradients (`pushed_gradients`). The training loop of a worker is in
`tfdist.synchronization.server_updates`.
"""
