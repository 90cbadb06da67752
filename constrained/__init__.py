"""From regex, choices, JSON Schema and grammars to token masks and forced tokens.

Independent of models and requests. The life of a grammar:

    GrammarSpec --compile_grammar--> CompiledGrammar --bind(vocabulary)-> BoundGrammar -> Matcher
    (hashable)   (a bounded worker)  (plain data)     (in the engine)      (shared)      (1 output)
"""
