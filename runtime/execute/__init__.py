"""Executes a step's plan: inputs, forward, sampler, captured graphs."""
