"""Grammar engines behind the same few verbs, each run by `worker` in a process of its own.

A peer's module runs under the peer's own Python: it imports the standard library, numpy, tokenizers
and the peer.
"""
