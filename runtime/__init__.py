"""The engine: programs, scheduling, execution and serving; stands on the four pillars."""
