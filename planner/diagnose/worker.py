"""The process of the script: hooks and sandbox first, then the script as `python script.py` runs it."""

from __future__ import annotations

import builtins
import contextlib
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from autoplan.planner.diagnose.records import Request
from autoplan.processes import RankContext
from autoplan.processes.cause import is_users_file
from autoplan.processes.script import run_as_main, run_module_as_main

ONE_RANK = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",  # any free one
}

THREADS = ("MKL_NUM_THREADS", "OMP_NUM_THREADS")
"""Variables that torch reads when it is imported; the first counts where both are set (ATen/ParallelOpenMP.cpp)."""

CACHES = {
    "TORCH_EXTENSIONS_DIR": "~/.cache/torch_extensions",
    "PYTORCH_KERNEL_CACHE_PATH": "~/.cache/torch/kernels",
    "TRITON_CACHE_DIR": "~/.triton/cache",
    "CUDA_CACHE_PATH": "~/.nv/ComputeCache",
}
"""Caches of compiled code beside torch's own: the variable that names each, and where it is without."""

DEVICES = ("/dev", "/proc")
"""Where the kernel lets the script write too: devices, and memory that processes share."""

RANKS_WAIT_S = 300.0
"""A rank waits so long for the others: longer than the budget, at whose end the process is ended."""

LAST_WAIT_S = 3.0
"""For the others to hear the last word of rank 0, which serves the store."""


def run_script(context: RankContext, request: Request, function: Callable[[], Any] | None) -> None:
    """Runs the script, or the function, until the session ends the process or it ends by itself.

    Args:
        context: Of this process; its result is the `Answer`, written anew after each piece.
        request: What is asked.
        function: Runs in the place of a script.
    """
    context.phase("script")
    import torch

    from autoplan.planner.diagnose.landlock import restrict_writes
    from autoplan.planner.diagnose.ranks import Peers
    from autoplan.planner.diagnose.sandbox import Sandbox
    from autoplan.planner.diagnose.session import Session

    sandbox = Sandbox(Path(request.sandbox), free=(str(context.directory), *_caches(request.sandbox)))
    process = os.getpid()
    said: list[str] = []
    restricted = False

    def report(answer: Any) -> None:
        if os.getpid() == process:
            context.report(answer.model_copy(update={"notes": tuple(said), "restricted": restricted}))

    def end() -> None:
        if os.getpid() == process:
            context.leave(LAST_WAIT_S)
            _flush()
            os._exit(0)  # also out of a script that catches every exception

    peers = None
    if request.nproc > 1:
        os.environ.update(TORCHELASTIC_RESTART_COUNT="0", GROUP_RANK="0", GROUP_WORLD_SIZE="1")
        os.environ.update(ROLE_RANK=str(context.rank), ROLE_WORLD_SIZE=str(context.world_size))
        peers = Peers(context.open_store(max(RANKS_WAIT_S, 2 * request.budget_s)), context.rank, context.world_size)
    session = Session(request, sandbox, report, end, lambda text: context.heartbeat(doing=text), peers)
    if request.one_rank:
        os.environ.update(ONE_RANK)
    if request.dynamic:  # whatever the script asks for
        compile_as_asked: Any = torch.compile
        torch.compile = lambda *args, **kwargs: compile_as_asked(*args, **kwargs | {"dynamic": True})
    session.hooks.install()
    if request.nproc > 1:
        session.hooks.collectives.install()
    sandbox.install()
    if request.nproc == 1 or not torch.cuda.is_available():  # ranks on GPUs share memory in ways that it may forbid
        restricted = restrict_writes((*sandbox.free, *DEVICES))
    _apply_threads(session.hooks, said)
    raised = _run(request, function)
    if os.getpid() != process:  # a process that the script has forked, and that came to the end of the script
        _leave_fork(raised)
    if raised is None or isinstance(raised, SystemExit) and raised.code in (None, 0):
        session.finish()
        context.leave(LAST_WAIT_S)
    else:
        error, line = _describe(raised), _line_of(raised)
        if isinstance(raised, SystemExit):
            if not isinstance(raised.code, int):
                print(raised.code, file=sys.stderr)
            error, line = f"exit code {_code(raised)}", None
        session.keep(how="raised", error=error, line=line, offline=_is_offline(raised), raised_at=time.monotonic())
    _flush()
    failed = session.answer.how == "raised" and request.nproc > 1  # so that the other ranks are ended
    os._exit(int(failed))  # what the script has registered for its end is of no use here


def _run(request: Request, function: Callable[[], Any] | None) -> BaseException | None:
    """Runs what is asked for; returns what it raised."""
    try:
        if request.script is None:
            assert function is not None
            function()
            return None
        sys.argv = [request.script, *request.arguments]
        if request.is_module:
            sys.path.insert(0, os.getcwd())
            run_module_as_main(request.script)
        else:
            sys.path.insert(0, os.path.dirname(os.path.realpath(request.script)))
            run_as_main(request.script)
    except BaseException as error:
        return error
    return None


def _leave_fork(raised: BaseException | None) -> None:
    """Ends it as Python does."""
    status = int(raised is not None)
    if isinstance(raised, SystemExit):
        status = 0 if raised.code is None else int(_code(raised))
    elif raised is not None:
        traceback.print_exception(raised)
    _flush()
    os._exit(status)


def _apply_threads(hooks: Any, said: list[str]) -> None:
    """Has torch take the number of threads that the script puts into the environment before it imports torch.

    It was imported before the script, so it is told at the end of the first step, unless the script tells it itself.
    """
    import torch

    before, on_step, set_threads = dict(os.environ), hooks.on_step, torch.set_num_threads
    told: list[int] = []
    set_before: list[tuple[str, int]] = []
    imported = builtins.__import__

    def first_import(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "torch":
            builtins.__import__ = imported
            set_before.append(_changed_threads(before))
        return imported(name, *args, **kwargs)

    def tell(nthreads: int) -> None:
        told.append(nthreads)
        set_threads(nthreads)

    def first_step() -> None:
        hooks.on_step, torch.set_num_threads, builtins.__import__ = on_step, set_threads, imported
        name, number = set_before[0] if set_before else ("", 0)
        if number and not told and number != torch.get_num_threads():
            set_threads(number)
            said.append(f"torch was given {name}={number} of the script at its first step: it was imported before")
        on_step()

    hooks.on_step, torch.set_num_threads, builtins.__import__ = first_step, tell, first_import


def _changed_threads(before: Mapping[str, str]) -> tuple[str, int]:
    """(variable, threads) that the script has set; 0: none."""
    for name in THREADS:
        found = os.environ.get(name, "").partition(",")[0]
        if found.isdigit() and os.environ[name] != before.get(name):
            return name, int(found)
    return "", 0


def _caches(sandbox: str) -> tuple[str, ...]:
    """Caches of compiled code, which stay: the user's own where there is one, else one beside torch's."""
    inductor = os.environ.get("TORCHINDUCTOR_CACHE_DIR", sandbox)
    os.makedirs(inductor, exist_ok=True)
    for variable, usual in CACHES.items():
        place = os.environ.get(variable) or os.path.expanduser(usual)
        if variable not in os.environ and not os.path.isdir(place):
            place = os.path.join(inductor, variable.lower())
        with contextlib.suppress(OSError):
            os.makedirs(place, exist_ok=True)
            os.environ[variable] = place
    return (inductor, *(os.environ[variable] for variable in CACHES if variable in os.environ))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _code(stop: SystemExit) -> str:
    return str(stop.code) if isinstance(stop.code, int) else "1"


def _text_of(error: BaseException) -> str:
    with contextlib.suppress(Exception):
        return str(error).strip()
    return ""


def _describe(error: BaseException) -> str:
    """The class and the first line of the text of an exception."""
    text = _text_of(error).partition("\n")[0][:200]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


OFFLINE = re.compile(r"offline mode|OfflineMode|LocalEntryNotFound|HF_HUB_OFFLINE|huggingface\.co", re.IGNORECASE)
"""Of the names and texts of errors of huggingface_hub, transformers and datasets."""


def _is_offline(error: BaseException | None) -> bool:
    """Whether it, or an error that it comes from, is of the Hugging Face Hub in its offline mode."""
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    return any(OFFLINE.search(f"{type(one).__name__} {_text_of(one)}") is not None for one in chain)


def _line_of(error: BaseException) -> str | None:
    """The innermost line of the user's own code, without its text."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_users_file(frame.filename)]
    return f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else None
