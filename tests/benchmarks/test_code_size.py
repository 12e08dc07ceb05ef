"""The counter of lines of code."""

from __future__ import annotations

from benchmarks.code_size import lines_of_code


def test_docstrings_comments_blank_lines_and_imports_are_no_code() -> None:
    source = '"""What it is.\n\nMore.\n"""\nimport os\nfrom sys import (\n    path,\n)\n\n# why\ndef f() -> str:\n'
    source += '    """Text."""\n'
    source += '    text = """a\n    b"""  # two lines\n    return text\n'
    assert lines_of_code(source) == 4
