"""Removes, renames, lists and changes into what was there before, and what it has made itself."""

import glob
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any


def fails(error: type[OSError], function: Callable[..., Any], *given: Any) -> None:
    try:
        function(*given)
    except error:
        return
    raise AssertionError(f"{function.__name__}{given} went well")


# There are: base.txt, shared.txt, old/a.txt, old/deep/b.txt, kept/c.txt, empty/, link -> base.txt
assert sorted(os.listdir()) == ["base.txt", "empty", "kept", "link", "old", "shared.txt"]

# What is removed is gone, and may be made again.
fails(OSError, os.rmdir, "old")
fails(OSError, os.remove, "old")
fails(NotADirectoryError, shutil.rmtree, "base.txt")
shutil.rmtree("base.txt", ignore_errors=True)
assert Path("base.txt").read_text() == "base"
os.remove("old/a.txt")
assert os.listdir("old") == ["deep"] and [one.name for one in os.scandir("old")] == ["deep"]
fails(FileNotFoundError, open, "old/a.txt")
fails(FileNotFoundError, os.remove, "old/a.txt")
shutil.rmtree("old")
assert not os.path.exists("old") and not Path("old/deep/b.txt").exists() and glob.glob("old/*") == []
fails(FileNotFoundError, os.listdir, "old")
os.makedirs("old")
assert os.listdir("old") == []
Path("old/new.txt").write_text("new")
assert glob.glob("old/**", recursive=True) == ["old/", "old/new.txt"]
os.unlink("link")
assert not os.path.lexists("link") and os.path.exists("base.txt")
os.rmdir("empty")
fails(FileNotFoundError, os.rmdir, "empty")

# What is made is listed beside what was there.
Path("kept/d.txt").touch()
Path("kept/sub").mkdir()
Path("kept/sub/e.txt").write_text("e")
assert sorted(glob.glob("kept/*.txt")) == ["kept/c.txt", "kept/d.txt"]
assert sorted(map(str, Path("kept").glob("**/*.txt"))) == ["kept/c.txt", "kept/d.txt", "kept/sub/e.txt"]
walked = [("kept", ["sub"], ["c.txt", "d.txt"]), ("kept/sub", [], ["e.txt"])]
assert [(top, folders, sorted(names)) for top, folders, names in os.walk("kept")] == walked
assert [top for top, _, _ in os.walk("kept", topdown=False)] == ["kept/sub", "kept"]
with os.scandir(Path("kept")) as entries:
    assert {one.path: one.is_dir() for one in entries} == {"kept/c.txt": False, "kept/d.txt": False, "kept/sub": True}
    assert next(entries, None) is None
Path("kept/c.txt").touch()  # it is there: nothing changes
fails(FileNotFoundError, os.utime, "none.txt")
shutil.copytree("kept", "copy", symlinks=True)
shutil.copy2("kept/d.txt", "copy/f.txt")
assert sorted(os.listdir("copy")) == ["c.txt", "d.txt", "f.txt", "sub"] and Path("copy/c.txt").read_text() == "c"

# What is renamed is gone from where it was.
os.rename("base.txt", "other.txt")
assert not os.path.exists("base.txt") and Path("other.txt").read_text() == "base"
os.rename("kept", "before")
assert not os.path.exists("kept") and sorted(os.listdir("before")) == ["c.txt", "d.txt", "sub"]
os.makedirs("kept")
assert os.listdir("kept") == []

# Folders of its own can be the current one.
top = os.getcwd()
os.chdir("before/sub")
assert os.listdir() == ["e.txt"] and Path("e.txt").read_text() == "e" and os.path.exists("../c.txt")
Path("g.txt").write_text("g")
assert Path(top, "before/sub/g.txt").read_text() == "g" and (Path.cwd() / "g.txt").exists()
os.chdir("../..")
assert os.path.samefile(os.getcwd(), top) and Path("before/sub/g.txt").exists()
fails(FileNotFoundError, os.chdir, "none")

# Links lead to what it sees.
os.symlink(os.path.abspath("before/sub"), "latest")
assert sorted(os.listdir("latest")) == ["e.txt", "g.txt"]
os.remove("latest")
assert os.path.exists("before/sub/e.txt")
os.mkdir(path="by_name", mode=0o755)
os.symlink(src=os.path.abspath("before/sub"), dst="by_name/link")
assert os.listdir("by_name") == ["link"] and sorted(os.listdir("by_name/link")) == ["e.txt", "g.txt"]
os.link("shared.txt", "mine.txt")
Path("mine.txt").write_text("mine")
assert Path("shared.txt").read_text() == "mine"
assert not os.path.exists("")
