"""What authors write: functions, states, gens, forks, batches."""
