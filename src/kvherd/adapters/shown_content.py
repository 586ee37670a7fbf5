"""Whether a chat template only shows what a message says, and never looks at it: then a turn of another message of the
same role has the same text around it.

Read off the parsed template, like its turns (`turn_template`): what is not known to be so is not so.
"""

from collections.abc import Iterable
from typing import Final

from jinja2 import nodes

_OF_DICTS: Final = frozenset(dir(dict))
_OF_TYPES: Final = frozenset(
    {"string", "defined", "undefined", "none", "mapping", "number", "boolean", "iterable", "sequence"}
)
"""Tests that are the same for any text."""


class _Unclear(Exception):
    """It may depend on what a message says."""


def only_shown(loop: nodes.For, behind: Iterable[nodes.Node], messages: Iterable[str]) -> bool:
    """Of a loop over the messages, which have these names: of each message that has a role and a content, a text that
    is not blank, and nothing else, the content is shown as it is or stripped, and nothing depends on it, nor on its
    number except whether it is the first. What stands `behind` the loop depends on no message.
    """
    named = set(messages)
    for node in behind:
        if any(one.name in named for one in (node, *node.find_all(nodes.Name)) if isinstance(one, nodes.Name)):
            return False
    if not isinstance(loop.target, nodes.Name):
        return False
    try:
        _Content(loop.target.name).follow(loop.body)
    except _Unclear:
        return False
    return True


class _Content:
    """Follows the content through a turn. Its methods raise `_Unclear`."""

    def __init__(self, message: str) -> None:
        self._message = message
        self._names: set[str] = set()
        """That have it in their text."""

    def follow(self, body: list[nodes.Node]) -> None:
        known = -1
        while known < len(self._names):  # a loop within may bring it to a name that was looked at before
            known = len(self._names)
            self._statements(body)

    def _statements(self, body: list[nodes.Node]) -> None:
        for node in body:
            match node:
                case nodes.Output():
                    for one in node.nodes:
                        self._has(one)
                case nodes.If():
                    self._has(node.test)
                    self._statements([*node.body, *node.elif_, *node.else_])
                case nodes.For():
                    self._without(node.iter)
                    if node.test is not None:
                        self._has(node.test)
                    self._statements([*node.body, *node.else_])
                case nodes.Assign(target=nodes.Name(name=name)) if name not in (self._message, "loop"):
                    if self._has(node.node):
                        self._names.add(name)
                case nodes.Continue():
                    pass
                case _:
                    raise _Unclear

    def _without(self, *parts: nodes.Node | None) -> None:
        for part in parts:
            if part is not None and self._has(part):
                raise _Unclear

    def _has(self, node: nodes.Node) -> bool:
        """Whether its text has the content in it; that is never blank, so it counts as true."""
        match node:
            case nodes.Const() | nodes.TemplateData():
                return False
            case nodes.Name(name=name):
                if name in (self._message, "loop"):
                    raise _Unclear
                return name in self._names
            case nodes.Getattr() | nodes.Getitem():
                return self._part(node)
            case nodes.Add() | nodes.And() | nodes.Or():
                return True in [self._has(node.left), self._has(node.right)]
            case nodes.Concat():
                return True in [self._has(one) for one in node.nodes]
            case nodes.Not():
                self._has(node.node)
                return False
            case nodes.CondExpr():
                self._has(node.test)
                return True in [self._has(one) for one in (node.expr1, node.expr2) if one is not None]
            case _:
                return self._has_otherwise(node)

    def _has_otherwise(self, node: nodes.Node) -> bool:
        match node:
            case nodes.Filter(name="trim", args=[], kwargs=[]) if node.node is not None:
                return self._has(node.node)
            case nodes.Test(name=name) if name in _OF_TYPES and not node.args:
                if not self._is_message(node.node):
                    self._has(node.node)
                return False
            case nodes.Compare(ops=[nodes.Operand(op="in" | "notin", expr=right)]) if self._is_message(right):
                self._without(node.expr)
                return False
            case nodes.Call(node=nodes.Getattr(node=text, attr="strip"), args=[], kwargs=[]):
                return self._has(text)
            case nodes.Call(node=nodes.Getattr(node=nodes.Name(name=name), attr="get")) if name == self._message:
                self._without(*node.args[1:])
                return bool(node.args) and not node.kwargs and self._field(node.args[0])
            case nodes.Filter() | nodes.Test() | nodes.Compare() | nodes.Operand() | nodes.Call() | nodes.BinExpr():
                self._without(*node.iter_child_nodes())
                return False
            case nodes.UnaryExpr() | nodes.Slice() | nodes.List() | nodes.Tuple() | nodes.Dict() | nodes.Pair():
                self._without(*node.iter_child_nodes())
                return False
            case nodes.Keyword():
                self._without(node.value)
                return False
            case _:
                raise _Unclear

    def _part(self, node: nodes.Getattr | nodes.Getitem) -> bool:
        if self._is_message(node.node):
            return self._field(nodes.Const(node.attr) if isinstance(node, nodes.Getattr) else node.arg)
        if isinstance(node, nodes.Getattr) and isinstance(node.node, nodes.Name) and node.node.name == "loop":
            if node.attr != "first":
                raise _Unclear
            return False
        self._without(node.node, *([node.arg] if isinstance(node, nodes.Getitem) else []))
        return False

    def _field(self, name: nodes.Node) -> bool:
        if not isinstance(name, nodes.Const) or not isinstance(name.value, str) or name.value in _OF_DICTS:
            raise _Unclear
        return name.value == "content"

    def _is_message(self, node: nodes.Node) -> bool:
        return isinstance(node, nodes.Name) and node.name == self._message
