"""What a model needs and how fast it will be, before it is loaded; the simulated scheduler."""
