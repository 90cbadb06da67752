"""What lies on disk of a model: where it is found, its config, its tensors, its adapters."""
