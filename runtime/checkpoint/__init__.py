"""A model on disk: its location, config, tensors and adapters."""
