"""The parts of a GPU session. Each takes a Session, runs its steps and leaves what they found in the archive."""

from __future__ import annotations

import functools
import itertools
import json
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.gpu_session import Session

Knobs = dict[str, Any]
ROUND_S = 90.0
"""Of one round of (b2) at the most that is expected; none is begun with less time left."""

HAND: Knobs = {"precision": "bf16", "attention": "sdpa", "optimizer_step": "fused", "compile": "model"}

# What is trained: (the built-in model, changed fields, tokens per sequence, sequences per step). No dropout, because
# the published figures have none; 50,304 is the vocabulary padded to a multiple of 64.
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MODELS: Mapping[str, tuple[str, Knobs, int, int]] = {
    "gpt2": ("gpt2", {"vocab_size": 50304, **NO_DROPOUT}, 1024, 512),
    "bert": ("bert-base", {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}, 512, 256),
    "qwen": ("qwen2.5-0.5b", {}, 2048, 64),
    "llama": ("llama3.2-1b", {}, 2048, 64),
}
SMALLER: Knobs = {
    "n_layer": 2,
    "n_embd": 64,
    "n_head": 4,
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "n_positions": 128,
    "max_position_embeddings": 128,
    "rope_scaling": None,
    "layer_types": None,
    "max_window_layers": 2,
}
SMALL_LENGTH, SMALL_BATCH = 64, 16
HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
EXAMPLES = ROOT / "examples"
LORA = ROOT / "benchmarks" / "data" / "llama_lora.py"
APART = ("micro_batch", "fp8")
"""Knobs that are varied apart: one is a number, and a GPT-2 has no layers for the other."""

LANE_S, VALUE_LANES = 180.0, 3
"""Seconds of a step of a lane of part s at the most; how many lanes share the values of the knobs."""

TWO_LAYERS: Knobs = {"n_layer": 2, "n_embd": 256, "n_head": 4, "n_positions": 256}
TWO_LLAMA_LAYERS: Knobs = {
    **{"num_hidden_layers": 2, "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8},
    **{"num_key_value_heads": 4, "head_dim": 128, "vocab_size": 8192, "max_position_embeddings": 512},
    "rope_scaling": None,
}

CUDA_TESTS = (  # all files with a test marked cuda: to collect the whole suite takes a minute of the session
    "tests/probes/test_probes_measuring.py",
    "tests/probes/test_collectives.py",
    "tests/planner/search/test_loading.py",
    "tests/strategies/workloads/test_transfer.py",
)


def workload(session: Session, name: str) -> Knobs:
    """The workload, as the command line and gpu/trials.py take it; the model's configuration goes into the archive."""
    from autoplan.strategies.workloads import registry

    base, fields, length, batch = MODELS[name]
    config = registry.read_config(base) | fields
    if session.small:
        config |= {key: value for key, value in SMALLER.items() if key in config}
        length, batch = SMALL_LENGTH, SMALL_BATCH
    path = session.keep(f"models/{name}/config.json", config)
    return {"model": str(path), "sequence_length": length, "global_batch": batch}


def trials(
    session: Session,
    name: str,
    model: str,
    configs: list[Knobs],
    *,
    limit_s: float,
    environment: Mapping[str, str] | None = None,
    **task: Any,
) -> None:
    """Direct trials of some configurations; those that an earlier call made are not repeated."""
    document = {**workload(session, model), "device": session.device, "configs": configs, **task}
    path, out = session.keep(f"{name}.task.json", document), session.path(f"{name}.trials.jsonl")
    seconds = min(limit_s, session.left_s) - 10.0
    arguments = ("--task", str(path), "--out", str(out), "--seconds", f"{seconds:.0f}")
    session.python(name, "benchmarks.gpu.trials", *arguments, limit_s=limit_s, least_s=30.0, environment=environment)


def search(session: Session, name: str, model: str, budget_s: int, *options: str) -> None:
    """A search with a store in the archive; called again, it answers from there. `model`: of MODELS, or a function."""
    budget_s = 60 if session.small else budget_s
    if model in MODELS:
        given = workload(session, model)
        options = (*options, "--seq-len", str(given["sequence_length"]), "--global-batch", str(given["global_batch"]))
        model = given["model"]
    session.python(
        f"{name}.search",
        "autoplan",
        *("search", "--model", model, "--device", session.device, "--budget", f"{budget_s}s", "--json", *options),
        *("--out", str(session.path(f"{name}.plan.json")), "--store", str(session.path(f"stores/{name}"))),
        limit_s=1.1 * budget_s + 40,
        least_s=budget_s,
    )


def on_device(session: Session, config: Knobs) -> Knobs:
    """The knobs without those that a CPU does not have."""
    if session.device == "cuda":
        return config
    return {knob: value for knob, value in config.items() if knob != "compile_mode"}


# The parts.


def part_s(session: Session) -> None:
    """All that a user does, side by side: a look for what breaks. Its times mean nothing."""
    session.python("probe", "autoplan", "probe", "--fresh", "--json", "--device", session.device, limit_s=90)
    lanes = {**_every_value(session), **_users(session)}
    with ThreadPoolExecutor(len(lanes)) as pool:
        list(pool.map(functools.partial(_lane, session), lanes, lanes.values()))


def _lane(session: Session, name: str, steps: Sequence[Sequence[str]]) -> None:
    """Runs Python with each of these arguments, in a folder whose searches wait for no other lane's."""
    folder = session.path(f"lanes/{name}")
    (folder / "locks").mkdir(parents=True, exist_ok=True, mode=0o700)
    environment = {"XDG_RUNTIME_DIR": str(folder / "locks")}
    for number, arguments in enumerate(steps):
        command = [sys.executable, *arguments]
        session.run(f"{name}{number}", command, limit_s=LANE_S, environment=environment, folder=folder)


def _users(session: Session) -> dict[str, list[list[str]]]:
    """By lane: the doctor, the losses, the tests marked cuda, and the examples as their first lines say."""
    budget = ["--budget", "20s" if session.small else "75s"]
    search = ["-m", "autoplan", "search", "--device", session.device, *budget]
    doctor = ["-m", "autoplan", "doctor", "--budget", "45s"]
    run = ["-m", "autoplan", "run", "plan.json"]
    return {
        "doctor": [[*doctor, str(HERE / f"{name}.py")] for name in ("slow_loader", "slow_gpt")],
        "tests": [["-m", "pytest", "-q", "-m", "cuda", "-p", "no:cacheprovider", *map(str, _cuda_tests())]],
        "losses": [["-m", "benchmarks.gpu.losses", "--device", session.device]],
        "tutorial": [
            [*search, "--model", f"{EXAMPLES}/tutorial.py:workload"],
            [f"{EXAMPLES}/tutorial.py"],
            [*run, f"{EXAMPLES}/tutorial.py"],
            ["-m", "autoplan", "verify", "plan.json"],
        ],
        "images": [
            [*search, "--model", f"{EXAMPLES}/image_classifier.py:classifier", "--global-batch", "64"],
            [*run, f"{EXAMPLES}/apply_plan.py"],
            ["-m", "autoplan", "export", "plan.json"],
        ],
        "trainers": [[f"{EXAMPLES}/{name}.py", *budget] for name in ("transformers_trainer", "lightning_module")],
        "loops": [[f"{EXAMPLES}/{name}.py", *budget] for name in ("nanogpt", "accelerate_loop")],
    }


def _cuda_tests() -> list[Path]:
    return [ROOT / name for name in CUDA_TESTS]


def _every_value(session: Session) -> dict[str, list[list[str]]]:
    """By lane: trials of each value of each knob at a GPT-2 of two layers, and of what a Llama alone has."""
    from autoplan.strategies.workloads import registry

    base: Knobs = {"precision": "bf16", "attention": "sdpa", "optimizer_step": "fused", "micro_batch": 8}
    whole: Knobs = {**base, "compile": "model"}
    varied = [{**(whole if knob == "compile_mode" else base), knob: value} for knob, value in knob_settings(session)]
    blocks: Knobs = {**base, "compile": "block"}
    of_llama = [{**blocks, "fp8": "tensorwise"}, {**blocks, "fp8": "rowwise"}, {**base, "kernels": "liger"}]
    lanes = {}
    for number in range(VALUE_LANES + 1):
        name, sizes, configs = "gpt2", TWO_LAYERS, varied[number::VALUE_LANES]
        if number == VALUE_LANES:
            name, sizes, configs = "llama3.2-1b", TWO_LLAMA_LAYERS, of_llama
        config = registry.read_config(name) | sizes
        model = session.keep(f"models/two_layers{number}/config.json", config)
        task = {"model": str(model), "sequence_length": 256, "global_batch": 16, "device": session.device}
        path = session.keep(f"values{number}.task.json", {**task, "configs": configs, "deadline_s": 90.0})
        out = session.path(f"values{number}.trials.jsonl")
        arguments = [
            "-m",
            "benchmarks.gpu.trials",
            "--task",
            str(path),
            "--out",
            str(out),
            "--seconds",
            f"{LANE_S:.0f}",
        ]
        lanes[f"values{number}"] = [arguments]
    return lanes


def knob_settings(session: Session) -> list[tuple[str, Any]]:
    """Each value of each knob of a run that the device has; the micro-batch and fp8 are left out."""
    from autoplan.strategies.config import KNOBS, knob_values, knobs

    facts = knobs()
    names = [knob for knob in KNOBS if facts[knob].role == "run" and facts[knob].device in (None, session.device)]
    return [(knob, value) for knob in names if knob not in APART for value in knob_values(knob) or ()]


def part_a(session: Session) -> None:
    """The machine as it is, the tests marked cuda, three trials."""
    if session.device == "cuda":
        session.run("nvidia-smi", ["nvidia-smi", "-q"], limit_s=15)
        session.run("topology", ["nvidia-smi", "topo", "-m"], limit_s=15)
    session.python("probe", "autoplan", "probe", "--fresh", "--json", "--device", session.device, limit_s=90)
    code = "import json; from benchmarks.gpu.trials import left_behind; print(json.dumps(left_behind()))"
    session.run("driver", [sys.executable, "-c", code], limit_s=30)
    size = 8 if session.small else 32
    graphs = on_device(session, {**HAND, "micro_batch": size, "compile_mode": "reduce-overhead"})
    configs = [{"micro_batch": size, "precision": "bf16"}, {**HAND, "micro_batch": size}]
    trials(session, "a", "gpt2", configs, limit_s=180)
    trials(session, "a.graphs", "gpt2", [graphs], limit_s=90, global_batch=size)
    which = CUDA_TESTS[:1] if session.small else CUDA_TESTS
    session.python("tests", "pytest", "-q", "-m", "cuda", "-p", "no:cacheprovider", *which, limit_s=120)


def part_b1(session: Session) -> None:
    """The search for GPT-2 124M."""
    search(session, "gpt2", "gpt2", 420)


def part_b2(session: Session) -> None:
    """The plan, the script by hand and the fp32 baseline, interleaved."""
    plan = session.path("gpt2.plan.json")
    common = ["--device", session.device, *(["--small"] if session.small else [])]
    seconds = "2" if session.small else "12"
    kept = session.path("by_hand.json")
    if not kept.exists():
        found = session.python("by_hand.find", "benchmarks.gpu.by_hand", "--find", *common, limit_s=150)
        if found is None:
            return
        session.keep("by_hand.json", json.loads(found.splitlines()[-1]))
    size = str(json.loads(kept.read_text())["micro_batch"])
    programs = {
        "hand": ("benchmarks.gpu.by_hand", "--micro-batch", size, "--seconds", seconds, *common),
        "plan": ("benchmarks.gpu.run_plan", str(plan), "--seconds", seconds),
        "baseline": ("benchmarks.gpu.run_plan", str(plan), "--baseline", "--seconds", seconds),
    }
    if not plan.exists():  # (b1) has left none: the script by hand alone
        programs = {"hand": programs["hand"]}
    first = sum(1 for _ in session.results.glob("round*.order.json"))
    for number in itertools.count(first):
        if session.left_s < (30.0 if session.small else ROUND_S) or (session.small and number >= 2):
            return
        order = list(programs)
        random.Random(time.time_ns()).shuffle(order)
        session.keep(f"round{number}.order.json", order)
        ran = [session.python(f"round{number}.{name}", *programs[name], limit_s=ROUND_S) for name in order]
        if None in ran:
            return


def part_c(session: Session) -> None:
    """Predicted against measured: memory by the allocator, step times; four families, five configurations each."""
    families = {"gpt2": (4, 32), "bert": (8, 32), "qwen": (1, 4), "llama": (1, 4)}
    for number, (model, sizes) in enumerate(families.items()):
        small, large = (2, 8) if session.small else sizes
        configs: list[Knobs] = [
            {"micro_batch": small},
            {"micro_batch": large, "precision": "bf16"},
            {"micro_batch": large, "precision": "bf16", "checkpointing": "full"},
            {"micro_batch": small, "precision": "bf16", "loss": "fused", "optimizer_step": "fused"},
            {"micro_batch": large, "precision": "bf16", "compile": "block"},
        ]
        limit_s = session.left_s / (len(families) - number)
        trials(session, f"c.{model}", model, configs, limit_s=limit_s, predict=True, deadline_s=60.0)


def part_d(session: Session) -> None:
    """The allocator's segments; then one knob after another: compile modes, attention, all that the space has; fp8."""
    from autoplan.strategies.config import knob_values

    sizes = (4, 8) if session.small else (64, 128, 256)
    largest: list[Knobs] = [{**HAND, "compile": "off", "micro_batch": size} for size in sizes]
    expandable = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    trials(session, "d.segments", "gpt2", largest, limit_s=60)
    trials(session, "d.expandable", "gpt2", largest, limit_s=60, environment=expandable)
    base: Knobs = {**HAND, "micro_batch": 8 if session.small else 32}
    first = ["compile_mode", "attention", "compile", "precision", "loss", "optimizer_step", "checkpointing"]
    settings = knob_settings(session)
    settings.sort(key=lambda one: first.index(one[0]) if one[0] in first else len(first))
    varied = [{**base, knob: value} for knob, value in settings]
    eager = {**base, "compile": "off"}
    varied += [{**eager, "attention": value} for value in knob_values("attention") or ()]
    trials(session, "d", "gpt2", [base, *varied], limit_s=420, deadline_s=200.0)
    if session.device == "cuda":
        plain: Knobs = {**HAND, "compile": "block", "micro_batch": 2 if session.small else 8}
        recipes = [{**plain, "fp8": value} for value in knob_values("fp8") or ()]
        uncompiled = {**plain, "compile": "off", "fp8": "tensorwise"}
        trials(session, "d.fp8", "llama", [*recipes, uncompiled], limit_s=100, predict=True)


def part_m(session: Session) -> None:
    """Two trainings whose plain run takes more than there is: Llama 3.2 1B in fp32, and a Llama of 7B with LoRA."""
    search(session, "llama", "llama", 215, "--memory-limit", "2GiB" if session.small else "22GiB")
    lora = f"{LORA}:{'workload' if session.small else 'workload_7b'}"
    search(session, "lora", lora, 215, "--memory-limit", "2GiB" if session.small else "22GiB")


def part_l(session: Session) -> None:
    """The forms of the fused loss at the heads of three models."""
    session.python("losses", "benchmarks.gpu.losses", "--device", session.device, limit_s=200)


PARTS: Mapping[str, Callable[[Session], None]] = {
    "s": part_s,
    "a": part_a,
    "b1": part_b1,
    "m": part_m,
    "l": part_l,
    "b2": part_b2,
    "c": part_c,
    "d": part_d,
}
