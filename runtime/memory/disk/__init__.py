"""The disk tier: blocks of KV in files, by content. No torch."""
