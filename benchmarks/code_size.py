"""How large the code is: files, lines, and lines of code per package, of the source and of the tests.

    python -m benchmarks.code_size

Lines of code leave out docstrings, comments, blank lines and imports. `make lint` prints the table; it fails nothing.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PARTS = {"source": ("autoplan", "probes", "strategies", "planner"), "tests": ("tests",), "benchmarks": ("benchmarks",)}
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def lines_of_code(text: str) -> int:
    """How many lines of a source hold code: no docstrings, comments, blank lines or imports."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = {line for t in tokens if t.type not in LAYOUT for line in range(t.start[0], t.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.Import | ast.ImportFrom) or (docstring and isinstance(node.value.value, str)):
            lines.difference_update(range(node.lineno, node.end_lineno + 1))
    return len(lines)


def sizes(folder: Path) -> dict[str, tuple[int, ...]]:
    """(files, lines, lines of code) of each package right under a folder, and of the files beside them."""
    found: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(ROOT).parts
        text = path.read_text()
        for i, count in enumerate((1, len(text.splitlines()), lines_of_code(text))):
            found["/".join(parts[:2] if len(parts) > 2 else parts[:1])][i] += count
    return {name: tuple(counts) for name, counts in sorted(found.items())}


def main() -> None:
    """Prints the table."""
    print(f"{'':32}{'files':>8}{'lines':>8}{'code':>8}")
    for part, folders in PARTS.items():
        rows = {name: size for folder in folders for name, size in sizes(ROOT / folder).items()}
        rows[f"all {part}"] = tuple(map(sum, zip(*rows.values(), strict=True)))
        for name, (files, lines, code) in rows.items():
            print(f"{name:32}{files:8,}{lines:8,}{code:8,}")
        print()


if __name__ == "__main__":
    main()
