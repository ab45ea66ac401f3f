"""Parameter servers: processes that hold variables and update them with the gradients that workers push.

`coordinator` orders updates by the rules of `update_order`, `variable_server` applies them, and `remote_variables` is what a
worker sees; of embedding tables, servers have `table_rows` and workers see `embedding_tables`. They communicate by gRPC
(`messages`); the loop of a worker is `tfdist.synchronization.server_updates`.
"""
