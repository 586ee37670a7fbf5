"""A chat template cut at its turns, where it can be: one loop over the messages, each turn of which tells of little
but its own message.

    what stands before the loop │ turn │ turn │ … │ what stands behind it

Whether a turn depends on others is read off the parsed template, never guessed from what it renders: whatever is not
known to be harmless makes a template one that is rendered as a whole. Harmless is what depends on the message, the
first one, those beside it, its number, and what is the same for all; not what one turn leaves for another.
"""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

from jinja2 import Environment, Template, nodes

from kvherd.adapters.shown_content import only_shown
from kvherd.core.text.turns import RenderedTurns, TurnUnreadError

_MESSAGES: Final = "messages"
_FRESH, _MARK, _BEFORE = "_kvherd_fresh", "_kvherd_mark", "_kvherd_before"
_TURNS, _HIDDEN = "_kvherd_turns", "_kvherd_hidden"
_METHODS: Final = frozenset(
    {"capitalize", "endswith", "get", "items", "join", "keys", "lower", "lstrip", "removeprefix", "removesuffix"}
    | {"replace", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip", "title", "upper", "values"}
)
_CALLED: Final = frozenset({"raise_exception", "range", "dict", "namespace"})
_EXPRESSIONS: Final = (
    nodes.Const,
    nodes.TemplateData,
    nodes.Name,
    nodes.Getattr,
    nodes.Getitem,
    nodes.Slice,
    nodes.Filter,
    nodes.Test,
    nodes.Compare,
    nodes.Operand,
    nodes.CondExpr,
    nodes.BinExpr,
    nodes.UnaryExpr,
    nodes.Concat,
    nodes.List,
    nodes.Tuple,
    nodes.Dict,
    nodes.Pair,
    nodes.Keyword,
    nodes.Call,
)
_STATEMENTS: Final = (nodes.Output, nodes.If, nodes.For, nodes.Assign, nodes.AssignBlock, nodes.Continue)


class _Refused(Exception):
    """Its turns cannot be told apart."""


class TurnTemplate:
    """Renders the last turns of a chat. Pure and safe in threads.

    `ahead`: how many messages must follow one before its turn is known for good. `only_shown`: see `shown_content`.
    """

    def __init__(self, template: Template, ahead: int, *, only_shown: bool) -> None:
        self.ahead = ahead
        self.only_shown = only_shown
        self._template = template
        self._globals = dict(template.globals)
        self._mark = secrets.token_hex(16)

    def render(self, variables: Mapping[str, Any], count: int) -> RenderedTurns:
        """The last `count` turns, of one message each, fewer only if what stands before them takes up the first one.

        `variables` are those of the whole chat; of its other messages all but the first and the last may be `UNREAD`.
        Raises `TurnUnreadError` where the whole has to be rendered after all, and what the template raises.
        """
        own = {_FRESH: count, _MARK: self._mark, _BEFORE: _before}
        context = self._template.new_context({**self._globals, **variables, **own}, shared=True)
        text = "".join(self._template.root_render_func(context))
        opening, begun, *turns, ending = text.split(self._mark)
        if begun or len(turns) > count:
            raise TurnUnreadError
        return RenderedTurns(opening, turns, ending)


def turn_template(environment: Environment, source: str) -> TurnTemplate | None:
    """The template cut at its turns; None if it cannot be. `source` has to compile."""
    tree = environment.parse(source)
    cutter = _Cutter(tree)
    try:
        cutter.cut()
    except _Refused:
        return None
    tree.set_environment(environment).set_lineno(1)
    code = environment.compile(tree)
    whole = Template.from_code(environment, code, environment.make_globals(None))
    return TurnTemplate(whole, cutter.ahead, only_shown=cutter.only_shown)


def _before(number: int) -> int:
    """Before the first there is none, and at -1 is the last: what is there may change."""
    if number < 1:
        raise TurnUnreadError
    return number - 1


@dataclass
class _Cutter:
    """Judges a template and rewrites it in place. Every method raises `_Refused`."""

    tree: nodes.Template
    names: set[str] = field(default_factory=lambda: {_MESSAGES})
    """The messages, or all but the first ones."""
    called: set[str] = field(default_factory=lambda: set(_CALLED))
    ahead: int = 0
    only_shown: bool = False

    def cut(self) -> None:
        body = self.tree.body
        at = next((at for at, node in enumerate(body) if self._of_messages(node, body[:at])), None)
        if at is None:
            raise _Refused
        self._judge_before(body[:at])
        loop = body[at]
        assert isinstance(loop, nodes.For)
        if loop.test is not None or loop.recursive or loop.else_ or not isinstance(loop.target, nodes.Name):
            raise _Refused
        self._judge_turn(loop)
        self.only_shown = not self.ahead and only_shown(loop, body[at + 1 :], self.names)
        shown = loop.iter
        assert isinstance(shown, nodes.Name)
        loop.iter = nodes.Getitem(shown, nodes.Slice(nodes.Neg(_name(_FRESH)), None, None), "load")
        for node in loop.body:
            _with_numbers(node)
        loop.body = [_mark(), *loop.body]
        hidden = nodes.Sub(_length(_name(shown.name)), _length(_name(_TURNS)))
        body[at : at + 1] = [
            _mark(),
            nodes.Assign(nodes.Name(_TURNS, "store"), loop.iter),
            nodes.Assign(nodes.Name(_HIDDEN, "store"), hidden),
            loop,
            _mark(),
        ]
        loop.iter = _name(_TURNS)

    # --- what stands before the loop ---------------------------------------------------------------------------

    def _of_messages(self, node: nodes.Node, before: Sequence[nodes.Node]) -> bool:
        self.names = {_MESSAGES}
        assigned = [one for each in before for one in (each, *each.find_all(nodes.Assign))]
        for _ in assigned:  # a name may be given on
            self.names |= {
                one.target.name
                for one in assigned
                if isinstance(one, nodes.Assign) and isinstance(one.target, nodes.Name) and self._are_messages(one.node)
            }
        return isinstance(node, nodes.For) and isinstance(node.iter, nodes.Name) and node.iter.name in self.names

    def _are_messages(self, node: nodes.Node) -> bool:
        """The messages by one of their names, or all but the first of them."""
        if isinstance(node, nodes.Getitem):
            cut = node.arg
            whole = isinstance(cut, nodes.Slice) and cut.stop is None and cut.step is None
            if not whole or not isinstance(cut, nodes.Slice) or not _is(cut.start, 1):
                return False
            node = node.node
        return isinstance(node, nodes.Name) and node.name in self.names and node.ctx == "load"

    def _judge_before(self, before: Sequence[nodes.Node]) -> None:
        self.called |= {one.name for each in before for one in _all(each) if isinstance(one, nodes.Macro)}
        for node in before:
            self._judge_common(node)

    def _judge_common(self, node: nodes.Node) -> None:
        """It depends on no message but the first, and calls nothing that is not known."""
        if isinstance(node, nodes.Assign) and self._are_messages(node.node):
            return
        if isinstance(node, nodes.Getitem) and self._is_first(node):
            return
        if isinstance(node, nodes.Name) and node.name in self.names:
            raise _Refused
        if not isinstance(node, (*_EXPRESSIONS, *_STATEMENTS, nodes.Macro, nodes.NSRef, nodes.Break)):
            raise _Refused
        self._judge_call(node)
        for child in node.iter_child_nodes():
            self._judge_common(child)

    def _is_first(self, node: nodes.Getitem) -> bool:
        return isinstance(node.node, nodes.Name) and node.node.name in self.names and _is(node.arg, 0)

    def _judge_call(self, node: nodes.Node) -> None:
        if isinstance(node, nodes.Filter) and node.name == "random":
            raise _Refused
        if isinstance(node, nodes.Call):
            named = isinstance(node.node, nodes.Name) and node.node.name in self.called
            if not named and not (isinstance(node.node, nodes.Getattr) and node.node.attr in _METHODS):
                raise _Refused

    # --- a turn ------------------------------------------------------------------------------------------------

    def _judge_turn(self, loop: nodes.For) -> None:
        macros = [one for one in _all(self.tree) if isinstance(one, nodes.Macro)]
        if any(isinstance(one, nodes.NSRef) for macro in macros for one in _all(macro)):
            raise _Refused  # called from a turn it could leave something for the next
        self.called.discard("namespace")
        for node in loop.body:
            self._judge_part(node, inner=False)

    def _judge_part(self, node: nodes.Node, *, inner: bool) -> None:
        if not isinstance(node, (*_EXPRESSIONS, *_STATEMENTS)):
            raise _Refused
        if isinstance(node, nodes.Getitem) and isinstance(node.node, nodes.Name) and node.node.name in self.names:
            self._judge_other(node.arg, inner=inner)
            return
        if isinstance(node, nodes.Getattr) and isinstance(node.node, nodes.Name) and node.node.name == "loop":
            self._judge_loop(node.attr, inner=inner)
            return
        if isinstance(node, nodes.Name) and (node.name in self.names or (node.name == "loop" and not inner)):
            raise _Refused
        self._judge_call(node)
        if isinstance(node, nodes.For):
            self._judge_part(node.iter, inner=inner)
            rest = [*node.body, *node.else_, *([node.test] if node.test else [])]
            for child in rest:
                self._judge_part(child, inner=True)
            return
        for child in node.iter_child_nodes():
            self._judge_part(child, inner=inner)

    def _judge_loop(self, what: str, *, inner: bool) -> None:
        if inner:
            return
        if what not in ("first", "last", "index", "index0"):
            raise _Refused
        if what == "last":
            self.ahead = 1

    def _judge_other(self, place: nodes.Node, *, inner: bool) -> None:
        """The first message, or one beside that of the turn."""
        if _is(place, 0):
            return
        beside = isinstance(place, nodes.Add | nodes.Sub) and _is(place.right, 1) and _is_number(place.left)
        if not beside or inner:
            raise _Refused
        if isinstance(place, nodes.Add):
            self.ahead = 1


def _with_numbers(node: object) -> object:
    """Put the number of a message in the whole chat in place of its number among those that are rendered."""
    if isinstance(node, nodes.Getattr) and isinstance(node.node, nodes.Name) and node.node.name == "loop":
        return _of_whole(node)
    if isinstance(node, nodes.Sub) and _is_number(node.left) and _is(node.right, 1):
        return nodes.Call(_name(_BEFORE), [_number()], [], None, None)
    if isinstance(node, nodes.For):  # within it the word means another loop
        node.iter = cast("nodes.Expr", _with_numbers(node.iter))
        return node
    if isinstance(node, nodes.Node):
        for name, value in list(node.iter_fields()):
            if isinstance(value, list):
                setattr(node, name, [_with_numbers(one) for one in value])
            else:
                setattr(node, name, _with_numbers(value))
    return node


def _of_whole(node: nodes.Getattr) -> nodes.Expr:
    match node.attr:
        case "first":
            return nodes.And(nodes.Not(_name(_HIDDEN)), node)
        case "index0":
            return _number()
        case "index":
            return nodes.Add(_number(), nodes.Const(1))
        case _:
            return node


def _number() -> nodes.Expr:
    """How many are not rendered, and how many are before it of those that are."""
    return nodes.Add(nodes.Getattr(_name("loop"), "index0", "load"), _name(_HIDDEN))


def _length(messages: nodes.Expr) -> nodes.Expr:
    return nodes.Filter(messages, "length", [], [], None, None)


def _all(node: nodes.Node) -> Iterator[nodes.Node]:
    yield node
    yield from node.find_all(nodes.Node)


def _is(node: object, value: int) -> bool:
    return isinstance(node, nodes.Const) and node.value == value and type(node.value) is int


def _is_number(node: nodes.Node) -> bool:
    named = isinstance(node, nodes.Getattr) and isinstance(node.node, nodes.Name) and node.node.name == "loop"
    return named and isinstance(node, nodes.Getattr) and node.attr == "index0"


def _name(name: str) -> nodes.Name:
    return nodes.Name(name, "load")


def _mark() -> nodes.Output:
    return nodes.Output([_name(_MARK)])
