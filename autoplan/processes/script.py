"""Runs a script as `python script.py` does, and says at its end if it never asked for the plan.

    python script.py train.py --its arguments          # this file's own path; RUNNER names it

`autoplan run` starts it in the place of the script: the process, the terminal, the signals and the exit code are those
of the script. It is started by its path and imports Python's own modules alone.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import os
import sys
from importlib.machinery import SourceFileLoader
from types import ModuleType

RUNNER = __file__

ASKED_VARIABLE = "AUTOPLAN_PLAN_ASKED"
"""The environment variable with the path of a file that is made once a plan is loaded, in whatever process."""


def main() -> None:
    """Runs the script of `sys.argv[1]`."""
    del sys.argv[0]
    script = sys.argv[0]
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    ended_well: list[bool] = []
    atexit.register(
        _say_unasked, script, os.getpid(), ended_well
    )  # the first to be registered is the last to be called
    try:
        run_as_main(script)
    except SystemExit as stop:
        ended_well += [True] * (stop.code in (None, 0))
        raise
    ended_well.append(True)


def run_as_main(script: str) -> None:
    """Runs a file as the module `__main__`; `sys.argv` and `sys.path` are the caller's to set."""
    module = ModuleType("__main__")
    module.__file__ = os.path.abspath(script)
    module.__loader__ = SourceFileLoader("__main__", module.__file__)
    sys.modules["__main__"] = module
    with open(script, "rb") as file:
        code = compile(file.read(), module.__file__, "exec", dont_inherit=True)
    exec(code, vars(module))


def run_module_as_main(name: str) -> None:
    """Runs a module as `python -m` does; `sys.path` and the arguments in `sys.argv` are the caller's to set."""
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    code = None if spec is None else spec.loader.get_code(spec.name)  # type: ignore[union-attr]
    if spec is None or code is None:
        raise ModuleNotFoundError(f"no module named {name} that can be run", name=name)
    module = importlib.util.module_from_spec(spec)
    module.__name__ = "__main__"
    sys.modules["__main__"] = module
    sys.argv[0] = spec.origin or name
    exec(code, vars(module))


def _say_unasked(script: str, pid: int, ended_well: list[bool]) -> None:
    """Says it on stderr, where the script ended well, and removes the folder of the file that says so."""
    asked = os.environ.get(ASKED_VARIABLE)
    if asked is None or os.getpid() != pid or os.environ.get("RANK", "0") != "0":
        return
    if ended_well and not os.path.exists(asked):
        plan = os.path.basename(os.environ.get("AUTOPLAN_PLAN", "the plan"))
        print(
            f"note: {script} never asked for the plan, so {plan} changed nothing in it but threads and allocator. Ask "
            "in the script: plan = autoplan.current_plan(); then run = plan.prepare(model, optimizer, loss), or "
            "trainer = plan.apply_to(trainer)",
            file=sys.stderr,
        )
    for remove, path in ((os.unlink, asked), (os.rmdir, os.path.dirname(asked))):
        with contextlib.suppress(OSError):
            remove(path)


def note_asked() -> None:
    """Notes, for the script that `autoplan run` started, that a plan was asked for."""
    asked = os.environ.get(ASKED_VARIABLE)
    if asked is not None:
        with contextlib.suppress(OSError):  # the folder is gone with the script
            os.close(os.open(asked, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600))


if __name__ == "__main__":
    main()
