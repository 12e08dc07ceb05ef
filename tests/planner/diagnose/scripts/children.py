"""Starts processes of each kind, which write, change and remove files of the user."""

import contextlib
import io
import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path


def work(name: str) -> None:
    Path(name).write_text("child")
    Path("base.txt").write_text(name)
    if name == "fork":
        os.remove("shared.txt")
    assert not os.path.exists("shared.txt")
    assert not os.path.exists("old/a.txt")


def main() -> None:
    os.remove("old/a.txt")
    for method in ("fork", "spawn", "forkserver"):
        process = multiprocessing.get_context(method).Process(target=work, args=(method,))
        process.start()
        process.join()
        assert process.exitcode == 0, method
        assert Path(method).read_text() == "child" and Path("base.txt").read_text() == method
    code = "import os, shutil; open('made.txt', 'w').write('x'); shutil.rmtree('kept')"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert Path("made.txt").read_text() == "x"

    # What is no Python writes where it may.
    subprocess.run('echo x > "$TMPDIR/x" && rm "$TMPDIR/x" && echo x > /dev/null', shell=True, check=True)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sub").mkdir()
        subprocess.run("echo x > a && mv a sub/b", shell=True, check=True, cwd=folder)
    with multiprocessing.Pool(1) as pool, multiprocessing.Manager() as manager:
        assert pool.map(len, ["ab"]) == [2] and manager.list([1])[0] == 1
    if os.environ["KERNEL"] == "1":
        for command in ("echo x > base.txt", "rm kept/c.txt", "mkdir new", "mv kept/c.txt kept/d.txt", "rmdir empty"):
            assert subprocess.run(command, shell=True, stderr=subprocess.DEVNULL).returncode, command
        with contextlib.suppress(PermissionError):
            io.FileIO("kept/c.txt", "w")
            raise AssertionError("it was opened")


if __name__ == "__main__":
    main()
