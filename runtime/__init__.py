"""The engine: programs, scheduling, execution; stands on the four pillars."""
