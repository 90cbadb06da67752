"""The layers from which models are composed."""
