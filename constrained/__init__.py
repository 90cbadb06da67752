"""From regex, choices, JSON Schema and grammars to token masks and forced tokens.

Independent of models and requests. The life of a grammar:

    GrammarSpec --compile_grammar--> CompiledGrammar --bind(vocabulary)-> BoundGrammar -> Matcher
    (hashable)   (a bounded worker)  (plain data)     (in the engine)      (shared)      (1 output)
"""

from .compiler import CompiledGrammar, Limits, compile_grammar, prepare
from .matcher import BoundGrammar, Mask, Matcher
from .spec import GrammarSpec
from .vocabulary import Vocabulary

__all__ = [
    "BoundGrammar",
    "CompiledGrammar",
    "GrammarSpec",
    "Limits",
    "Mask",
    "Matcher",
    "Vocabulary",
    "compile_grammar",
    "prepare",
]
