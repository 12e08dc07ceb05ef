"""The process of the script: hooks and sandbox first, then the script as `python script.py` runs it."""

from __future__ import annotations

import functools
import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autoplan.planner.diagnose.records import Request
from autoplan.processes import RankContext
from autoplan.processes.cause import is_users_file
from autoplan.processes.script import run_as_main

ONE_RANK = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",  # any free one
}

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

    from autoplan.planner.diagnose.ranks import Peers
    from autoplan.planner.diagnose.sandbox import Sandbox
    from autoplan.planner.diagnose.session import Session

    sandbox = Sandbox(Path(request.sandbox), free=_free_folders(context))

    def report(answer: Any) -> None:
        context.report(answer)

    def end() -> None:
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
    if request.dynamic:
        torch.compile = functools.partial(_compile, torch.compile)
    session.hooks.install()
    if request.nproc > 1:
        session.hooks.collectives.install()
    sandbox.install()
    try:
        if request.script is None:
            assert function is not None
            function()
        else:
            sys.argv = [request.script, *request.arguments]
            sys.path.insert(0, os.path.dirname(os.path.realpath(request.script)))
            run_as_main(request.script)
        session.finish()
        context.leave(LAST_WAIT_S)
    except SystemExit as stop:
        how, error = ("ended", None) if stop.code in (None, 0) else ("raised", f"exit code {_code(stop)}")
        if not isinstance(stop.code, (int, type(None))):
            print(stop.code, file=sys.stderr)
        if how == "ended":
            session.finish()
            context.leave(LAST_WAIT_S)
        else:
            session.keep(how=how, error=error, offline=_is_offline(stop), raised_at=time.monotonic())
    except BaseException as error:
        session.keep(
            how="raised",
            error=_describe(error),
            line=_line_of(error),
            offline=_is_offline(error),
            raised_at=time.monotonic(),
        )
    _flush()
    failed = session.answer.how == "raised" and request.nproc > 1  # so that the other ranks are ended
    os._exit(int(failed))  # what the script has registered for its end is of no use here


def _compile(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """torch.compile with dynamic=True, whatever the script asks for."""
    return function(*args, **kwargs | {"dynamic": True})


def _free_folders(context: RankContext) -> tuple[str, ...]:
    """Where the process itself writes: its results, and caches of compiled code."""
    caches = (os.environ.get(name, "") for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"))
    return (str(context.directory), *caches)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:
            pass


def _code(stop: SystemExit) -> str:
    return str(stop.code) if isinstance(stop.code, int) else "1"


def _text_of(error: BaseException) -> str:
    try:
        return str(error).strip()
    except Exception:
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
