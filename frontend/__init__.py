"""The DSL, the program IR, the wire protocol and its client; knows nothing of models or KV."""
