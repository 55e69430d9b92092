"""What is known of a source file without running it: scopes, statements, and the places that no mutant is worth."""

import ast
import hashlib
from dataclasses import dataclass
from functools import cached_property

Place = tuple[int, int]  # a line from 1, a column from 0, in characters
Scoped = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Statement:
    """A simple statement, or the head of a compound one, and the scope that it runs in."""

    first: int
    last: int
    scope: str  # the qualified name of the function or class around it; empty at the top of the module
    at_import: bool  # it runs when the module is imported, not when a function is called
    defines: tuple[str, ...] = ()  # the names that it binds at import


class Code:
    """One source file.

    >>> code = Code("def f(x):\\n    if x > 1:\\n        return 2\\n    return 3\\n")
    >>> [(s.first, s.last, s.scope, s.at_import) for s in code.statements]
    [(1, 1, '', True), (2, 2, 'f', False), (3, 3, 'f', False), (4, 4, 'f', False)]
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.lines = text.splitlines()
        self.tree = ast.parse(text)
        self.scopes: dict[str, Scoped] = {}
        self.statements: list[Statement] = []
        self._read(self.tree.body, "", at_import=True)
        self.statements.sort(key=lambda s: (s.first, s.last))

    def _read(self, body: list[ast.stmt], scope: str, at_import: bool) -> None:
        for node in body:
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
            blocks = [getattr(node, name, []) for name in ("body", "orelse", "finalbody")]
            blocks += [handler.body for handler in getattr(node, "handlers", [])]
            blocks += [case.body for case in getattr(node, "cases", [])]
            inner = [child for block in blocks for child in block]
            last = max(first, inner[0].lineno - 1) if inner else node.end_lineno or first
            self.statements.append(Statement(first, last, scope, at_import, _bound(node)))
            if isinstance(node, Scoped):
                name = f"{scope}.{node.name}" if scope else node.name
                self.scopes[name] = node
                self._read(node.body, name, at_import and isinstance(node, ast.ClassDef))
            else:
                for block in blocks:
                    self._read(block, scope, at_import)

    def scope_at(self, line: int) -> str:
        """The function or class that the line runs in."""
        return self.statement_at(line).scope

    def statement_at(self, line: int) -> Statement:
        """The smallest statement around a line."""
        around = [s for s in self.statements if s.first <= line <= s.last]
        if not around:
            return Statement(line, line, "", at_import=True)
        return min(around, key=lambda s: (s.last - s.first, -s.first))

    def digest(self, scope: str) -> str:
        """Of the text of a function or class: the same wherever it stands in the file."""
        node = self.scopes[scope]
        return hashlib.sha1("\n".join(self.lines[node.lineno - 1 : node.end_lineno]).encode()).hexdigest()[:10]

    def functions_for(self, statement: Statement) -> list[str]:
        """The functions that can show what a statement at import does.

        The head of a function: that function. The body of a class: its methods. A name of the module: the functions
        that mention it. Otherwise every function of the file.
        """
        functions = [name for name, node in self.scopes.items() if not isinstance(node, ast.ClassDef)]
        prefix = f"{statement.scope}." if statement.scope else ""
        headed = [prefix + name for name in statement.defines if prefix + name in self.scopes]
        if headed:
            chosen = [f for f in functions if any(f == h or f.startswith(f"{h}.") for h in headed)]
        elif statement.scope:
            chosen = [f for f in functions if f.startswith(prefix)]
        else:
            chosen = [f for f in functions if not self._names(f).isdisjoint(statement.defines)]
        return chosen or functions

    def _names(self, function: str) -> set[str]:
        return {node.id for node in ast.walk(self.scopes[function]) if isinstance(node, ast.Name)}

    def is_worthless(self, place: Place) -> bool:
        """Whether a mutant there can tell nothing: annotations, messages of errors, `__all__`, signatures."""
        line, column = place
        inside = [(end, start) for start, end in self._worthless if start <= (line, column) < end]
        return bool(inside) and not any(start <= (line, column) < end for start, end in self._defaults)

    def _span(self, *nodes: ast.expr | ast.stmt | ast.arg) -> tuple[Place, Place]:
        """The places of nodes in characters: `ast` counts bytes."""

        def place(line: int, column: int) -> Place:
            return line, len(self.lines[line - 1].encode()[:column].decode())

        first, last = nodes[0], nodes[-1]
        return place(first.lineno, first.col_offset), place(last.end_lineno or 0, last.end_col_offset or 0)

    @cached_property
    def _defaults(self) -> list[tuple[Place, Place]]:
        arguments = [node for node in ast.walk(self.tree) if isinstance(node, ast.arguments)]
        return [self._span(d) for a in arguments for d in [*a.defaults, *a.kw_defaults] if d is not None]

    @cached_property
    def _worthless(self) -> list[tuple[Place, Place]]:
        spans: list[tuple[Place, Place]] = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                head = (node.lineno, node.col_offset), (node.body[0].lineno, node.body[0].col_offset)
                spans.append(head)  # the stars, the annotations; defaults are taken out again
                if any(ast.unparse(d).endswith("overload") for d in node.decorator_list):
                    spans.append(self._span(node))
            elif isinstance(node, ast.AnnAssign):
                spans.append(self._span(node.annotation))
            elif isinstance(node, ast.Raise):
                spans.append(self._span(node))
            elif isinstance(node, ast.Assert) and node.msg:
                spans.append(self._span(node.msg))
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("warnings.warn", "warn", "cast"):
                spans.append(self._span(node))
            elif isinstance(node, ast.If) and ast.unparse(node.test) in _NEVER_TESTED:
                spans.append((self._span(node)[0], self._span(*node.body)[1]))
        for node in self.tree.body:
            if isinstance(node, ast.Assign) and any(_is_type_or_all(t) for t in node.targets):
                spans.append(self._span(node))
        return spans


_NEVER_TESTED = ("TYPE_CHECKING", "typing.TYPE_CHECKING", "__name__ == '__main__'")


def _is_type_or_all(target: ast.expr) -> bool:
    """`__all__`, or a name in capitals and small letters, which is a type made of others."""
    if not isinstance(target, ast.Name):
        return False
    name = target.id.lstrip("_")
    return target.id == "__all__" or (name[:1].isupper() and not name.isupper())


def _bound(node: ast.stmt) -> tuple[str, ...]:
    if isinstance(node, Scoped):
        return (node.name,)
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return tuple(n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name))
