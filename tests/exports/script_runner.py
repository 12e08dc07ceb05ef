"""Six steps of an exported PyTorch script, by its own functions, in as many ranks as it is for.

A program of its own, which imports torch and transformers once and forks the ranks of each script; it refuses to
import autoplan. It reads lines of JSON, `[script, record, ranks, steps]`, writes what the first rank recorded as
`SixSteps.save` does, and answers each line with the ranks' exit codes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import sys
import traceback
from typing import Any


class _Refuse:
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.split(".")[0] == "autoplan":
            raise ImportError("autoplan cannot be imported here")


def train(script: str, record: str, steps: int) -> None:
    """Runs the functions of a script; the first rank writes the record."""
    import torch

    spec = importlib.util.spec_from_file_location("exported", script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["exported"] = module
    spec.loader.exec_module(module)

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()
        return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).cpu().clone()

    def own(name: str) -> str:
        return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")

    run = module.prepare("cpu")
    found: dict[str, Any] = {"losses": [], "grad_norms": [], "learning_rates": []}
    for number in range(steps):
        found["learning_rates"].append(float(run.optimizer.param_groups[0]["lr"]))
        result = module.train_step(run, module.rank_batch(run, number))
        found["losses"].append(float(result.loss))
        found["grad_norms"].append(0.0 if result.grad_norm is None else float(result.grad_norm))
    held = set(map(own, run.model.state_dict()))
    found["parameters"] = {own(name): whole(value) for name, value in run.model.named_parameters()}
    found["buffers"] = {own(name): whole(value) for name, value in run.model.named_buffers() if own(name) in held}
    if os.environ.get("RANK", "0") == "0":
        torch.save(found, record)


def fork_ranks(script: str, record: str, ranks: int, steps: int) -> list[int]:
    """Runs a script in forked ranks, with what torchrun would set; returns their exit codes."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            _be_rank(script, record, rank, ranks, port, steps)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def _be_rank(script: str, record: str, rank: int, ranks: int, port: int, steps: int) -> None:
    file = os.open(f"{record}.{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    if ranks > 1:
        number, count = str(rank), str(ranks)
        os.environ.update(RANK=number, LOCAL_RANK=number, WORLD_SIZE=count, LOCAL_WORLD_SIZE=count)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    status = 1
    try:
        train(script, record, steps)
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def main() -> None:
    sys.meta_path.insert(0, _Refuse())  # type: ignore[arg-type]
    import torch  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401

    for line in sys.stdin:
        print(json.dumps(fork_ranks(*json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
