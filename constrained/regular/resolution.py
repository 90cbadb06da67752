"""Anchors and lookaheads of a regex, resolved into expressions over the whole text.

A zero-width assertion constrains all the text before or after it, so a regex with assertions is
resolved from its end to its beginning, given the language of the rest of the text: `$` makes the
rest empty, a lookahead is an intersection with the rest, `^` keeps only what holds at the text's
start. What looks back (a lookbehind, `\\b`, `^` of lines) asks for the last characters before its
position. A rest is therefore several languages, one for each kind of position: what stands before
it, as far as the regex tells characters apart (`Window`).

    resolve(a(?=b)., rest) = a . (b ANYTHING  and  . rest)
    resolve(.(?<=a), rest) = (. and a) . rest after an a
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import NamedTuple, TypeAlias

from ...errors import Picklable
from ..grammar import (
    EMPTY_WORD,
    NOTHING,
    Alt,
    And,
    Chars,
    Concat,
    Expression,
    Literal,
    Not,
    Repeat,
    alt,
    concat,
    optional,
    repeat,
)
from .assertions import (
    ANYTHING,
    ASSERTIONS,
    Behind,
    Boundary,
    Choice,
    End,
    Look,
    Loop,
    Node,
    Sequence,
    Start,
    lengths,
)
from .charsets import ALL, Ranges, contains, difference, intersection
from .membership import matches

SOMETHING = Repeat(Chars(ALL), 1, None)
MAX_ASSERTIONS = 50  # counted once per turn of a repetition; nesting grows with them
MAX_TREE_SIZE = 200_000  # nodes, counting shared ones at each use
MAX_BEHIND = 8  # characters that a lookbehind looks at
MAX_KINDS = 64  # of positions: blocks of characters to the power of places

_Kind: TypeAlias = tuple[int, ...]
Rest: TypeAlias = dict[_Kind, Expression]
"""Texts that may follow, for each kind of position; one object where they agree."""


class Unresolvable(Picklable, Exception):
    """An unsupported use of assertions: what, and its position in the pattern."""

    def __init__(self, reason: str, position: int) -> None:
        super().__init__(reason)
        self.reason = reason
        self.position = position


class Window(NamedTuple):
    """What of the text before a position matters: the blocks of its last `size` characters.

    `blocks` divide all characters such that no lookbehind tells two of one block apart. A kind of
    position is a tuple of them; a shorter one than `size` is all that there is before.
    """

    blocks: tuple[Ranges, ...] = (ALL,)
    size: int = 1

    @property
    def kinds(self) -> list[_Kind]:
        """All kinds of positions; the first is the text's start."""
        blocks = range(len(self.blocks))
        return [kind for size in range(self.size + 1) for kind in product(blocks, repeat=size)]

    def after(self, kind: _Kind, more: _Kind) -> _Kind:
        """The kind of position after further characters."""
        return (kind + more)[-self.size :]

    def ends_in(self, kind: _Kind, ranges: Ranges) -> bool:
        """Whether the last character is one of these, which are whole blocks."""
        return bool(kind) and contains(ranges, self.blocks[kind[-1]][0][0])

    def text(self, kind: _Kind) -> str:
        """One of the texts that stand before such a position."""
        return "".join(chr(self.blocks[block][0][0]) for block in kind)

    def characters(self, kind: _Kind) -> Expression:
        """All texts of these blocks."""
        return concat(*(Chars(self.blocks[block]) for block in kind))


def resolve(node: Node, *, anchored: bool) -> Expression:
    """The whole texts that match: all of the text, or, unanchored, any stretch of it.

    Raises Unresolvable.
    """
    if not isinstance(node, ASSERTIONS):
        return node if anchored else concat(ANYTHING, node, ANYTHING)
    if _num_assertions(node) > MAX_ASSERTIONS:
        raise Unresolvable(f"more than {MAX_ASSERTIONS} anchors and lookaheads, repeated ones", 0)
    resolver = _Resolver(_window(node))
    end = EMPTY_WORD if anchored else ANYTHING
    found = resolver.before(node, resolver.everywhere(end))
    if not anchored:
        found = resolver.before(ANYTHING, found)
    whole = found[()]
    if _tree_size(whole) > MAX_TREE_SIZE:
        reason = "its lookarounds and anchors multiply to an expression too large"
        raise Unresolvable(reason + "; remedy: fewer of them", 0)
    return whole


class _Resolver:
    """Works from a regex's end to its beginning."""

    def __init__(self, window: Window) -> None:
        self.window = window
        self.kinds = window.kinds

    def everywhere(self, rest: Expression) -> Rest:
        return dict.fromkeys(self.kinds, rest)

    def before(self, node: Node, rest: Rest) -> Rest:
        """The rest of the text from the node's beginning, given the rest from its end."""
        match node:
            case Start(newlines):
                return self._where(lambda k: not k or self.window.ends_in(k, newlines), rest)
            case End(may_precede_newline, newlines):
                return _each(rest, lambda text: _ending(text, may_precede_newline, newlines))
            case Boundary():
                return self._before_boundary(node, rest)
            case Behind(body, is_negative):
                assert not isinstance(body, ASSERTIONS), "_window refuses it"
                seen = concat(ANYTHING, body)
                window = self.window
                return self._where(lambda k: matches(seen, window.text(k)) != is_negative, rest)
            case Look():
                ahead = self.before(node.body, self.everywhere(ANYTHING))
                return _both(_each(ahead, Not) if node.is_negative else ahead, rest)
            case Sequence(parts):
                for part in reversed(parts):
                    rest = self.before(part, rest)
                return rest
            case Choice(parts):
                return _either(*(self.before(part, rest) for part in parts))
            case Loop():
                return self._before_loop(node, rest)
            case _:
                return self._before_expression(node, rest)

    def _where(self, holds: Callable[[_Kind], bool], rest: Rest) -> Rest:
        return {kind: text if holds(kind) else NOTHING for kind, text in rest.items()}

    def _before_boundary(self, node: Boundary, rest: Rest) -> Rest:
        begins = concat(Chars(node.word), ANYTHING)
        begins_not = Not(begins)
        found = {}
        for kind, text in rest.items():
            is_word = self.window.ends_in(kind, node.word)
            found[kind] = _and(begins if is_word == node.is_negative else begins_not, text)
        if node.is_negative and node.needs_text:
            found[()] = _and(SOMETHING, found[()])
        return found

    def _before_expression(self, expression: Expression, rest: Rest) -> Rest:
        """By the last characters of the expression's texts where it matters which these are."""
        size, start = self.window.size, ()
        last = [kind for kind in self.kinds if len(kind) == size]
        shorter = [kind for kind in self.kinds if kind and len(kind) < size]
        is_nullable = _is_nullable(expression)
        if all(rest[kind] is rest[last[0]] for kind in (*shorter, *last)):
            inside = concat(expression, rest[last[0]])
            if rest[start] is rest[last[0]] or not is_nullable:
                return self.everywhere(inside)
            something = _and(expression, SOMETHING)
            texts = _alt(rest[start], concat(something, rest[last[0]]))
            return {kind: inside if kind else texts for kind in self.kinds}
        long = [
            concat(_and(expression, concat(ANYTHING, _alt(*ends))), text)
            for text, ends in self._by_rest(last, rest)
        ]
        least = lengths(expression)[0]
        short = [
            (more, _and(expression, self.window.characters(more)))
            for more in shorter
            if len(more) >= least
        ]
        return {
            kind: _alt(
                *long,
                *(concat(part, rest[self.window.after(kind, more)]) for more, part in short),
                *([rest[kind]] if is_nullable else []),
            )
            for kind in self.kinds
        }

    def _by_rest(
        self, kinds: list[_Kind], rest: Rest
    ) -> Iterator[tuple[Expression, list[Expression]]]:
        """Each language that follows, and the texts behind which it does."""
        found: dict[int, tuple[Expression, list[Expression]]] = {}
        for kind in kinds:
            if rest[kind] != NOTHING:
                _, ends = found.setdefault(id(rest[kind]), (rest[kind], []))
                ends.append(self.window.characters(kind))
        yield from found.values()

    def _before_loop(self, loop: Loop, rest: Rest) -> Rest:
        after = rest
        if loop.most is None:
            rest = self._before_star(loop, rest)
        else:
            for _ in range(loop.most - loop.least):
                rest = _either(after, self.before(loop.part, rest))
        for _ in range(loop.least):
            rest = self.before(loop.part, rest)
        return rest

    def _before_star(self, loop: Loop, rest: Rest) -> Rest:
        """Within the loop `^` and `$` hold only in the first turn and in the last two: one at the
        end, one more over the newline that may follow Python's `$`."""
        if _has_look(loop.part):
            return self._before_tempered(loop, rest)
        last = rest
        for _ in range(2):
            last = _either(rest, self.before(loop.part, last))
        behind = [last[kind] for kind in self.kinds if kind]
        if any(text is not behind[0] for text in behind):
            reason = "a lookbehind after an unbounded repetition with anchors"
            raise Unresolvable(reason, loop.position)
        inside = concat(repeat(_without_anchors(loop.part), 0), behind[0])
        following = {kind: inside if kind else NOTHING for kind in self.kinds}
        first = self.before(loop.part, following)[()]
        return {kind: inside if kind else _alt(last[()], first) for kind in self.kinds}

    def _before_tempered(self, loop: Loop, rest: Rest) -> Rest:
        """`((?!P).)*` up to the text's end: no P begins anywhere in the rest."""
        parts = loop.part.parts if isinstance(loop.part, Sequence) else ()
        looks = [part for part in parts[:-1] if isinstance(part, Look)]
        body = parts[-1] if parts else None
        if (
            not isinstance(body, Chars)
            or len(looks) < len(parts) - 1
            or any(text != EMPTY_WORD for text in rest.values())
        ):
            raise Unresolvable(
                "a lookaround or word boundary in an unbounded repetition is supported only as "
                "((?!..).)* at the end; remedy: repeat it a bounded number of times, as {0,8}",
                loop.position,
            )
        forbidden = []
        for look in looks:
            ahead = self.before(look.body, self.everywhere(ANYTHING))
            texts = list(ahead.values())
            if any(text is not texts[0] for text in texts):
                raise Unresolvable("^ in a lookahead that is repeated", look.position)
            forbidden.append(texts[0] if look.is_negative else Not(texts[0]))
        begins_forbidden = concat(ANYTHING, And((SOMETHING, _alt(*forbidden))))
        return self.everywhere(And((Repeat(body, 0, None), Not(begins_forbidden))))


def _each(rest: Rest, change: Callable[[Expression], Expression]) -> Rest:
    """Languages that are one object stay one."""
    changed: dict[int, Expression] = {}
    for text in rest.values():
        if id(text) not in changed:
            changed[id(text)] = change(text)
    return {kind: changed[id(text)] for kind, text in rest.items()}


def _either(*rests: Rest) -> Rest:
    return _combined(rests, _alt)


def _both(a: Rest, b: Rest) -> Rest:
    return _combined((a, b), _and)


def _combined(rests: tuple[Rest, ...], combine: Callable[..., Expression]) -> Rest:
    known: dict[tuple[int, ...], Expression] = {}
    found = {}
    for kind in rests[0]:
        texts = [rest[kind] for rest in rests]
        key = tuple(map(id, texts))
        if key not in known:
            known[key] = combine(*texts)
        found[kind] = known[key]
    return found


def _alt(*parts: Expression) -> Expression:
    """Without comparing parts, which may be large."""
    some = tuple({id(part): part for part in parts if part != NOTHING}.values())
    return some[0] if len(some) == 1 else Alt(some)


def _and(a: Expression, b: Expression) -> Expression:
    if a is ANYTHING or b is ANYTHING:
        return b if a is ANYTHING else a
    if NOTHING in (a, b):
        return NOTHING
    return And((a, b))


def _ending(rest: Expression, may_precede_newline: bool, newlines: Ranges) -> Expression:
    if newlines:
        return _and(optional(concat(Chars(newlines), ANYTHING)), rest)
    if may_precede_newline and rest != EMPTY_WORD:
        return _and(optional(Literal("\n")), rest)
    return EMPTY_WORD if _is_nullable(rest) else NOTHING


def _is_nullable(expression: Expression) -> bool:
    """Whether the expression, of a kind that a regex can hold, matches the empty text."""
    match expression:
        case Literal(text):
            return not text
        case Concat(parts) | And(parts):
            return all(map(_is_nullable, parts))
        case Alt(parts):
            return any(map(_is_nullable, parts))
        case Repeat(part, least, _):
            return least == 0 or _is_nullable(part)
        case Not(part):
            return not _is_nullable(part)
        case _:
            return False


def _has_look(node: Node) -> bool:
    match node:
        case Look() | Behind() | Boundary():
            return True
        case Start(newlines) | End(_, newlines):
            return bool(newlines)
        case Sequence(parts) | Choice(parts):
            return any(map(_has_look, parts))
        case Loop(part):
            return _has_look(part)
        case _:
            return False


def _without_anchors(node: Node) -> Expression:
    """The texts of a part without lookaheads where neither `^` nor `$` holds."""
    match node:
        case Start() | End():
            return NOTHING
        case Sequence(parts):
            return concat(*map(_without_anchors, parts))
        case Choice(parts):
            return alt(*map(_without_anchors, parts))
        case Loop(part, least, most):
            return repeat(_without_anchors(part), least, most)
        case _:
            assert not isinstance(node, ASSERTIONS)
            return node


def _num_assertions(node: Node) -> int:
    match node:
        case Start() | End() | Boundary():
            return 1
        case Look(body) | Behind(body):
            return 1 + _num_assertions(body)
        case Sequence(parts) | Choice(parts):
            return sum(map(_num_assertions, parts))
        case Loop(part, least, most):
            return _num_assertions(part) * (least + 3 if most is None else most)
        case _:
            return 0


def _window(node: Node) -> Window:
    """What the regex asks of the text before a position. Raises Unresolvable."""
    sets: dict[Ranges, None] = {}
    size = 1
    for part in _looking_back(node):
        if isinstance(part, Behind):
            if isinstance(part.body, ASSERTIONS):
                raise Unresolvable("an assertion within a lookbehind", part.position)
            longest = lengths(part.body)[1]
            if longest > MAX_BEHIND:
                reason = f"a lookbehind over more than {MAX_BEHIND} characters is supported only "
                raise Unresolvable(reason + "after something at least as long", part.position)
            size = max(size, int(longest))
            sets.update(dict.fromkeys(_sets_of(part.body)))
        else:
            sets[part.word if isinstance(part, Boundary) else part.newlines] = None
    blocks: list[Ranges] = [ALL]
    for ranges in sets:
        halves = ((intersection(block, ranges), difference(block, ranges)) for block in blocks)
        blocks = [half for pair in halves for half in pair if half]
    if len(blocks) ** size > MAX_KINDS:
        raise Unresolvable(
            f"its lookbehinds tell {len(blocks)} kinds of characters apart over {size} places, too "
            "many",
            0,
        )
    return Window(tuple(blocks), size)


def _looking_back(node: Node) -> Iterator[Behind | Boundary | Start]:
    match node:
        case Behind() | Boundary():
            yield node
        case Start(newlines):
            if newlines:
                yield node
        case Look(body) | Loop(body):
            yield from _looking_back(body)
        case Sequence(parts) | Choice(parts):
            for part in parts:
                yield from _looking_back(part)


def _sets_of(expression: Expression) -> Iterator[Ranges]:
    """The sets of characters that an expression tells apart."""
    match expression:
        case Literal(text):
            for character in text:
                yield ((ord(character), ord(character)),)
        case Chars(ranges):
            yield ranges
        case Concat(parts) | Alt(parts) | And(parts):
            for part in parts:
                yield from _sets_of(part)
        case Repeat(part) | Not(part):
            yield from _sets_of(part)


def _tree_size(expression: Expression) -> int:
    """Number of nodes, counting shared ones at each use; each is visited once."""
    sizes: dict[int, int] = {}

    def size(node: Expression) -> int:
        if id(node) not in sizes:
            match node:
                case Concat(parts) | Alt(parts) | And(parts):
                    sizes[id(node)] = 1 + sum(map(size, parts))
                case Repeat(part) | Not(part):
                    sizes[id(node)] = 1 + size(part)
                case _:
                    sizes[id(node)] = 1
        return sizes[id(node)]

    return size(expression)
