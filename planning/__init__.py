"""A model's memory needs and speed, predicted before it is loaded; the simulated scheduler."""
