"""GBNF: what is read, what is refused and where, and that no lexer changes the language."""

from __future__ import annotations

import functools
import itertools
import random

import pytest
from grammars import SINGLE_BYTES
from random_gbnf import is_text_of, random_gbnf

from stemma.constrained.compiler import compile_grammar
from stemma.constrained.gbnf import read_gbnf
from stemma.constrained.lexing import rules_to_lark
from stemma.constrained.matcher import BoundGrammar
from stemma.constrained.pushdown import PushdownGrammar
from stemma.constrained.spec import GrammarSpec
from stemma.errors import InvalidGrammar

# In the manner of llama.cpp's own examples.
ARITHMETIC = r"""
root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""
C = r"""
root ::= (declaration)*
declaration ::= dataType identifier "(" parameter? ")" "{" statement* "}"
dataType  ::= "int" ws | "float" ws | "char" ws
identifier ::= [a-zA-Z_] [a-zA-Z_0-9]*
parameter ::= dataType identifier
statement ::=
    ( dataType identifier ws "=" ws expression ";" ) |
    ( identifier ws "=" ws expression ";" ) |
    ( identifier ws "(" argList? ")" ";" ) |
    ( "return" ws expression ";" ) |
    ( "while" "(" condition ")" "{" statement* "}" ) |
    ( "if" "(" condition ")" "{" statement* "}" ("else" "{" statement* "}")? ) |
    ( "//" [^\n]* "\n" ) |
    ( "/*" ( [^*] | ("*" [^/]) )* "*/" )
condition ::= expression relationOperator expression
relationOperator ::= ("<=" | "<" | "==" | "!=" | ">=" | ">")
expression ::= term (("+" | "-") term)*
term ::= factor(("*" | "/") factor)*
factor ::= identifier | number | "-" factor | identifier "(" argList? ")" | "(" ws expression ws ")"
argList ::= expression ("," ws expression)*
number ::= [0-9]+
ws ::= ([ \t\n]+)
"""
CHESS = r"""
# The first move is "1. ", then any number of one or two digits
root    ::= "1. " move " " move "\n" ([1-9] [0-9]? ". " move " " move "\n")+
move    ::= (pawn | nonpawn | castle) [+#]?
nonpawn ::= [NBKQR] [a-h]? [1-8]? "x"? [a-h] [1-8]
pawn    ::= ([a-h] "x")? [a-h] [1-8] ("=" [NBKQR])?
castle  ::= "O-O" "-O"?
"""
JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws
string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws

# By convention after a text
ws ::= | " " | "\n" [ \t]{0,20}
"""
JSON_ARRAY = JSON.replace(
    "root   ::= object",
    'root ::= arr\narr ::= "[\\n" ws ( value (",\\n" ws value)* )? "]"',
)
LIST = r"""
root ::= item+
# Leaves out what may break a line
item ::= "- " [^\r\n\x0b\x0c\x85\u2028\u2029]+ "\n"
"""
JAPANESE = r"""
root        ::= jp-char+ ([ \t\n] jp-char+)*
jp-char     ::= hiragana | katakana | punctuation | cjk
hiragana    ::= [ぁ-ゟ]
katakana    ::= [ァ-ヿ]
punctuation ::= [、-〾]
cjk         ::= [一-鿿]
"""
ENGLISH = r"""
root ::= en-char+ ([ \t\n] en-char+)*
en-char ::= letter | digit | punctuation
letter ::= [a-zA-Z]
digit ::= [0-9]
punctuation ::= [!"#$%&'()*+,-./:;<=>?@[\\\]^_`{|}~]
"""
MANY_TEXTS = ["".join(t) for n in range(6) for t in itertools.product("abcé", repeat=n)]


@functools.lru_cache(maxsize=4)
def bound_of(source: str) -> BoundGrammar:
    return compile_grammar(GrammarSpec("ebnf", source)).bind(SINGLE_BYTES)


def accepts(source: str, text: str) -> bool:
    matcher = bound_of(source).matcher()
    return all(matcher.consume(byte) for byte in text.encode()) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("source", "yes", "no"),
    [
        (ARITHMETIC, ["a=1\n", "(a+b2 )*3=\n\nx\n", "a=1\nb\n=(2)\n\n\n"],
         ["a=1", "a=\n", "a+ b=1\n", "2a=1\n"]),
        (C, ["", "int f(int x){return x;}", "char g(){//\nwhile(a<=b){h (a, -1);}}",
                         "int f(){returns = 1;int whilex = 2;if(i!=f(i)){}else{/* ** */}}"],
         ["int f(){return;}", "intf(){}", "int f(){if (a<b){}}", "int f(){return x;"]),
        (CHESS, ["1. e4 e5\n2. Nf3 O-O-O\n"], ["1. e4 e5\n", "1. e9 e5\n2. e4 e4\n"]),
        (JSON, ["{}", '{"a":[1,-2.5e+3,{"b\\u00e9":null }],\n\t"c": "é"}'],
         ["[]", '{"a":01}', '{"a":1,}', '{"a":  1}']),
        (JSON_ARRAY, ["[\n]", '[\n {"a":[]},\n"b"]'], ["[]", "[\n1,2]"]),
        (LIST, ["- a\n- é - b\n"], ["", "- a", "- \n", "- a\u2028\n"]),
        (JAPANESE, ["ひらカタ漢、 字"], ["", "a", "字 ", "字  字"]),
        (ENGLISH, ["a [b]\\~\n9^"], ["", "é", "a  b"]),
        ('root ::= "a" root "b" |', ["", "ab", "aabb"], ["a", "abb", "aab"]),
        ('root ::= root "," i | i\ni ::= "x"{2}', ["xx", "xx,xx"], ["x", "xx,"]),
        ("root ::= [a-z]+ [a-z] root? [0-9]", ["ab1", "abcd12"], ["a1", "ab12"]),
        (r'root ::= "\x41\u00e9\U0001F600\t\"\\" [\x00-\x1f\]\-^] [^\n] .',
         ["Aé😀\t\"\\]a\n", "Aé😀\t\"\\\x00\r\u2028"], ["Aé😀\t\"\\]\na", "Aé😀\t\"\\aab"]),
        ("root ::= [-a] [a-] [^-^]", ["--a", "aa]"], ["---", "ab-", "-a^"]),
        ('root ::= "a"{0} ("b"{2,}){1,2} [c]?', ["bb", "bbbbbc"], ["b", "abb", ""]),
        ('root ::=\n "a"\n\n  | b # end\n\n\tb::="c"', ["a", "c"], ["", "ac"]),
        ('root ::= a_b "-"\na_b ::= ("x"\n"y")', ["xy-"], ["x-"]),
    ],
)  # fmt: skip
def test_a_grammars_texts_are_what_its_words_say(
    source: str, yes: list[str], no: list[str]
) -> None:
    assert [text for text in yes if not accepts(source, text)] == []
    assert [text for text in no if accepts(source, text)] == []


@pytest.mark.parametrize("seed", range(60))
def test_neither_automata_nor_the_parsers_lexer_change_a_language(seed: int) -> None:
    source = random_gbnf(seed)
    try:
        grammar = read_gbnf(source).grammar
    except InvalidGrammar as error:
        assert "derives no finite text" in str(error)
        return
    texts = random.Random(seed).sample(MANY_TEXTS, 40)
    true = [text for text in texts if is_text_of(grammar.rules, grammar.start, text)]
    assert [text for text in texts if accepts(source, text)] == true, source
    bound = PushdownGrammar(rules_to_lark(grammar), SINGLE_BYTES)
    found = []
    for text in texts:
        matcher = bound.matcher()
        if all(matcher.consume(byte) for byte in text.encode()) and matcher.is_accepting():
            found.append(text)
        assert matcher.error() is None
    assert found == true, source


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ('root ::= "a', "line 1, column 10: this text does not end"),
        ('root ::= "a"\nroot ::= "b"', "line 2, column 1: there is a rule 'root' already"),
        ('root ::= "a"\nx ::= [b-a]', "line 2, column 8: 'b' to 'a' is no ascending range"),
        ("root ::= [a", "line 1, column 10: this class does not end"),
        ("root ::= []", "line 1, column 10: a class without characters"),
        ("root ::= a b\nb ::= a", "line 1, column 10: there is no rule 'a'"),
        ('root ::= ("a" | "b"', "column 20: the grammar ends within a group"),
        ('root ::= ("a"\nx ::= "b"', "line 2, column 1: a rule begins within a group"),
        ('root ::= "a")', "column 13: '\\)' ends no group"),
        (r'root ::= "\q"', r"column 11: there is no escape '\\q'"),
        (r'root ::= "\xg1"', "column 11: 2 hexadecimal digits"),
        (r'root ::= "\uD800"', "column 11: .* is half a character"),
        (r'root ::= "\UFFFFFFFF"', "column 11: .* is no character"),
        ('root ::= "a"{2,1}', r"column 13: \{2,1\}: ascending numbers"),
        ('root ::= "a"{x}', r"column 13: \{m\}, \{m,\} or \{m,n\} is expected"),
        ("root ::= * ", "column 10: '\\*' begins no"),
        ('root ::= "a" (= "b")', "column 14: lookahead assertions are not supported"),
        ("root ::= <think>", "column 10: tokens by name"),
        ('start ::= "a"', "there is no rule 'root'"),
        ('"a"\nroot ::= "b"', "line 1, column 1: a rule is expected"),
        ('root ::= "a" root', "rule 'root' derives no finite text"),
        ('root ::= "(" x ")"\nx ::= y y\ny ::= "a" x', "rule 'y' derives no finite text"),
        ("root ::= " + "(" * 300 + '"a"' + ")" * 300, "nested deeper than 256"),
    ],
)  # fmt: skip
def test_what_is_no_grammar_is_refused_with_its_place(source: str, message: str) -> None:
    with pytest.raises(InvalidGrammar, match=message) as caught:
        compile_grammar(GrammarSpec("ebnf", source))
    assert caught.value.field == "ebnf"


def test_a_rule_that_cannot_end_is_left_out_where_others_can() -> None:
    source = 'root ::= "a" | x "b" | x? "c"\nx ::= "(" x'
    compiled = compile_grammar(GrammarSpec("ebnf", source))
    assert compiled.warnings == ("rule 'x' derives no finite text, and is left out",)
    assert accepts(source, "a") and accepts(source, "c") and not accepts(source, "(")
