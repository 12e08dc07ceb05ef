"""Runs the commands of docs/tutorial.md and puts what they print into the page.

    python docs/run_tutorial.py              # some ten minutes; then read the words around the outputs
    python docs/run_tutorial.py search show  # the blocks whose first command has one of these words, in the last folder

A block of commands begins with `$ `. The comment before it says which lines of the output the page shows (`keep:`, a
regular expression; the rest becomes `...`), or that the block is not run.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "tutorial.md"
FOLDER = Path(tempfile.gettempdir()) / "autoplan-tutorial"
BLOCK = re.compile(r"<!-- (?:keep: (?P<keep>.*?)|(?P<skip>not run)) -->\n```\n(?P<body>\$ .*?)```\n", re.DOTALL)
WIDTH = 116


def commands(body: str) -> list[str]:
    """The commands of a block."""
    return re.findall(r"^\$ (.*)$", body, re.MULTILINE)


def run(command: str, folder: Path) -> str:
    """What a command prints, stdout and stderr, in a folder of its own with a state and a cache of its own."""
    folders = {f"XDG_{name}": str(folder / f".{name.lower()}") for name in ("STATE_HOME", "CACHE_HOME", "RUNTIME_DIR")}
    (folder / ".runtime_dir").mkdir(mode=0o700, exist_ok=True)
    path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    words = {"NO_COLOR": "1", "COLUMNS": "100", "TERM": "dumb"}
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env={**os.environ, **folders, **path, **words},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    return done.stdout


def shown(output: str, keep: str) -> list[str]:
    """The lines of an output that a page shows, cut to its width; `...` for each run of others."""
    lines: list[str] = []
    for line in output.splitlines():
        if re.search(keep, line):
            lines.append(line if len(line) <= WIDTH else f"{line[: WIDTH - 4]} ...")
        elif lines[-1:] != ["..."]:
            lines.append("...")
    return [line.rstrip() for line in lines]


def forms(body: str, command: str) -> list[str]:
    """How each shown line of a command begins, up to its first figure or colon: what a new output must still have."""
    text = f"\n{body}".partition(f"\n$ {command}")[2].partition("\n$ ")[0]
    begins = (re.split(r"[\d(=:]|(?<=\S)\s{2,}", line)[0].strip() for line in text.splitlines() if line != "...")
    return [begin for begin in begins if begin]


def main(wanted: list[str]) -> None:
    """Runs the blocks and writes the page."""
    if not wanted:
        shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(exist_ok=True)
    shutil.copy(ROOT / "examples" / "tutorial.py", FOLDER)
    page = PAGE.read_text()
    for block in BLOCK.finditer(page):
        asked = commands(block["body"])
        if block["skip"] or (wanted and not any(word in asked[0] for word in wanted)):
            continue
        lines: list[str] = []
        for command in asked:
            print("$", command, flush=True)
            lines += [f"$ {command}", *shown(run(command, FOLDER), block["keep"])]
        page = page.replace(block["body"], "\n".join(lines) + "\n")
        PAGE.write_text(page)


if __name__ == "__main__":
    main(sys.argv[1:])
