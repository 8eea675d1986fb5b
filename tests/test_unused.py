"""What the package offers is used by it, by an example or a benchmark, or documented for users: not by tests alone."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.test_layering import MODULES, ROOT, files

KEPT = {
    "compare_set": "of a store, which torch asks",
    "delete_key": "of a store, which torch asks",
    "extra_repr": "what torch asks a layer for when it is shown",
    "has_extended_api": "of a store, which torch asks",
    "invoke": "of the commands, which click asks",
    "num_keys": "of a store, which torch asks",
    "old_trace": "renamed options, which say so when they are typed",
    "remove_node": "of a launcher, beside what adds one",
}
"""Names that only tests say, and why they are there."""

_LONGEST = 80
"""Characters of a string that may name something, as tables of handlers and planners do; longer ones are prose."""


def definitions(path: Path) -> Iterator[tuple[str, ast.stmt]]:
    """Yield the public names that a file defines: at its top, and in its classes; enumerations are named by value."""
    for node in ast.parse(path.read_text()).body:
        inside = node.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_") else []
        if isinstance(node, ast.ClassDef) and any("Enum" in ast.unparse(base) for base in node.bases):
            inside = []
        for each in (node, *inside):
            if isinstance(each, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                names = [each.name]
            elif isinstance(each, ast.Assign | ast.AnnAssign):
                targets = each.targets if isinstance(each, ast.Assign) else [each.target]
                names = [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
            else:
                names = []
            yield from ((name, each) for name in names if not name.startswith("_"))


def said(tree: ast.AST) -> Counter[str]:
    """Count the names that code uses, also those in strings, other than to define or import them."""
    words = Counter[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            words[node.id] += 1
        elif isinstance(node, ast.Attribute):
            words[node.attr] += 1
        elif isinstance(node, ast.keyword) and node.arg:
            words[node.arg] += 1
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) <= _LONGEST:
            words.update(set(re.findall(r"\w+", node.value)))
    return words


def documented() -> set[str]:
    """Return the names of the API reference, with all that its modules and classes have."""
    named = set(re.findall(r"^::: (?:resilient\.)?([\w.]+)", (ROOT / "docs/reference.md").read_text(), re.MULTILINE))
    found = {name.rpartition(".")[2] for name in named}
    for module, path in MODULES.items():
        inside = module.removeprefix("resilient.")
        for name, node in definitions(path):
            if inside in named or f"{inside}.{name}" in named:
                found.add(name)
                found |= {each.name for each in ast.walk(node) if isinstance(each, ast.FunctionDef)}
    return found


def test_what_is_public_is_used_or_documented() -> None:
    users = [*MODULES.values(), *files("examples"), *files("benchmarks")]
    used = sum((said(ast.parse(path.read_text())) for path in users), Counter[str]())
    allowed = documented() | KEPT.keys()
    unused = [
        f"{module}: {name}"
        for module, path in MODULES.items()
        for name, node in definitions(path)
        if used[name] <= said(node)[name] and name not in allowed
    ]
    assert unused == [], "only tests use it: delete it, with its tests, or use it"


def test_what_is_kept_is_there_and_used_by_nothing_else() -> None:
    defined = {name for path in MODULES.values() for name, _ in definitions(path)}
    assert KEPT.keys() <= defined
