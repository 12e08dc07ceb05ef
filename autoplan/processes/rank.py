"""The life of a rank, from the fork to the exit."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import pkgutil
import resource
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from autoplan.processes import linux
from autoplan.processes.context import RankContext, RankSpec
from autoplan.processes.files import write_json


def run_forked(spec: RankSpec, payload: bytes, inherited_fds: list[int]) -> NoReturn:
    """Runs the target in a process just forked from the zygote, and exits."""
    exit_code = 1
    try:
        _detach(spec, inherited_fds)
        if "numpy" in sys.modules:  # random states of the fork's own, as Python's `random` has them by itself
            sys.modules["numpy"].random.seed()
        if "torch" in sys.modules:
            sys.modules["torch"].manual_seed(int.from_bytes(os.urandom(7)))
        exit_code = _call_target(spec, payload)
    except BaseException:
        traceback.print_exc()
    finally:  # without the exit hooks that it inherited: what is left is the supervisor's to sweep
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(exit_code)


def _detach(spec: RankSpec, inherited_fds: list[int]) -> None:
    """Makes the fork a process of its own: group, signals, descriptors, limits."""
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    if not linux.die_with_parent(spec.zygote_pid):
        os._exit(1)
    # The zygote's end of the connection above all: with a copy here the planner would not see the zygote die.
    for fd in inherited_fds:
        if fd != spec.listen_fd:
            os.close(fd)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _redirect(0, os.devnull, os.O_RDONLY)
    _redirect(1, spec.file("stdout"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    _redirect(2, spec.file("stderr"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    # The kernel's OOM killer takes it before the planner. In a sandbox without the file the polled limit still applies.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("900")
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if spec.data_limit_bytes is not None:  # private writable memory, counted as it is mapped, not as it is touched
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        limit = spec.data_limit_bytes if hard == resource.RLIM_INFINITY else min(spec.data_limit_bytes, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    os.chdir(spec.request.cwd)


def _redirect(fd: int, path: str | Path, flags: int) -> None:
    opened = os.open(path, flags, 0o600)
    os.dup2(opened, fd)
    os.close(opened)


def _rank_env(spec: RankSpec) -> dict[str, str]:
    """The variables of torchrun where there are several ranks. A single one is a plain process: accelerate and the
    Trainer, which a user's function may make, would else look for the other ranks."""
    if spec.world_size == 1:
        return spec.request.env
    ranks = {"RANK": spec.global_rank, "LOCAL_RANK": spec.rank}
    local_size = spec.world_size if spec.request.placement is None else spec.request.ranks
    sizes = {"WORLD_SIZE": spec.world_size, "LOCAL_WORLD_SIZE": local_size}
    return {**{name: str(value) for name, value in (ranks | sizes).items()}, **spec.request.env}


def _call_target(spec: RankSpec, payload: bytes) -> int:
    """Calls the target and writes its result or its exception; returns the exit status."""
    request = spec.request
    sys.path[:] = request.sys_path
    sys.argv = ["autoplan-rank"]
    os.environ.update(_rank_env(spec))
    _reopen_streams()
    context = RankContext(spec)
    try:
        target, args = pickle.loads(payload)
        if request.target is not None:
            target = pkgutil.resolve_name(request.target)
        context.mark_started()
        result = target(context, *args)
        if not context.reported and result is not None:
            context.report(result)
    except SystemExit as stop:
        return _exit_status(stop)
    except BaseException as error:
        traceback.print_exc()
        write_json(spec.file("error.json"), _describe(error))
        return 1
    context.leave()
    return 0


def _reopen_streams() -> None:
    """Points Python's streams at the files, line by line, and has a fatal signal leave a traceback.

    SIGTERM too, before it ends the process as ever: so the report of a rank past its deadline says where it was.
    """
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1, closefd=False, errors="replace")  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="replace")  # noqa: SIM115
    faulthandler.enable(sys.stderr)
    faulthandler.register(signal.SIGTERM, sys.stderr, all_threads=False, chain=True)


def _exit_status(stop: SystemExit) -> int:
    """The status that Python itself would exit with."""
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code & 0xFF
    print(stop.code, file=sys.stderr)
    return 1


def _describe(error: BaseException) -> dict[str, Any]:
    return {
        "at": time.monotonic(),
        "error": {
            "type_name": _qualified_name(type(error)),
            "type_names": [_qualified_name(cls) for cls in type(error).__mro__],
            "message": _text_of(error),
            "traceback": "".join(traceback.format_exception(error)),
        },
    }


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as second:
        return f"(its text raised {type(second).__name__})"


def _qualified_name(cls: type) -> str:
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
