"""Regular languages: expressions and regex texts to minimal byte automata."""
