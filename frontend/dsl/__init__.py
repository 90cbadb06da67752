"""The authoring API: functions, states, gens, forks, batches."""
