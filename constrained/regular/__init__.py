"""Compiles regular expressions and regex texts to minimal byte automata."""
