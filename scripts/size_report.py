"""Print lines per module: all lines, and code without docstrings, comments and blank lines.

usage: size_report.py [--check]   (--check fails when a module or the core is over its limit)
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODULE_LIMIT = 400
CORE_LIMIT = 4000
NOT_CORE = {"cli.py", "__main__.py"}  # the command line is a front end, like the demo


def code_lines(source: str) -> int:
    """Return the lines that hold code: no docstring, comment or blank line."""
    held: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            held.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            held.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(held)


def main() -> int:
    """Print the report; return 1 if `--check` is given and a limit is broken."""
    failed, core_all, core_code = False, 0, 0
    for path in sorted([*ROOT.glob("akvcache/**/*.py"), *ROOT.glob("backends/**/*.py")]):
        source = path.read_text(encoding="utf-8")
        total, code = source.count("\n"), code_lines(source)
        name = path.relative_to(ROOT)
        failed |= total > MODULE_LIMIT
        print(f"{total:6d} {code:6d}  {name}{'  OVER' if total > MODULE_LIMIT else ''}")
        if name.parent == Path("akvcache") and name.name not in NOT_CORE:
            core_all, core_code = core_all + total, core_code + code
    failed |= core_code > CORE_LIMIT
    print(f"{core_all:6d} {core_code:6d}  core (akvcache/*.py); lines, lines of code")
    return int(failed and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
