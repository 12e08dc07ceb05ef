"""Which causes are worth removing, by what the first steps showed; in the order of what they may be worth."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from autoplan.planner.diagnose.records import LoaderFacts, Observation, Part, Suspect

LEAST_SHARE = 0.03
"""Less of the time is not worth a mend."""

LEAST_PADDING = 0.15
"""A share of padding below this is usual for batches of texts."""

LEAST_OPTIMIZER = 0.05
"""A fused optimizer saves about half of the optimizer's time, by torch's own benchmarks: less is within noise."""

LEAST_BF16 = 1.3
"""A product that is less faster than this in bf16 or TF32 gains nothing in a whole step: casts cost some."""

LEAST_GROWTH_BYTES = 1 << 18
"""A step that adds less fills no memory soon: 256 KiB is 2.6 GB after 10,000 steps."""

EACH_STEP = 0.6
"""A part that so many of the steps hold (`steps_with`) is one of each step."""

PREFETCH = 2
"""Batches that each worker of a DataLoader makes ahead, by default."""

MOST_WORKERS = 16


FUSABLE = ("elementwise", "norm", "softmax and loss", "reductions", "copies")
"""Kinds of operations that torch.compile makes one of: each alone goes over memory, or is launched by itself."""

LEAST_FUSABLE = 0.5
"""Of the time in such operations, from which on compiling is tried."""

CUDA_SETTLE = 3
"""Steps until kernels of another kind are loaded, and the allocator has their blocks."""

NO_EFFECT = "it did not reach the steps"
"""Of a trial in whose blocks nothing went another way: its times say nothing."""

TRIED: Mapping[str, str] = {
    "batches": "batches that are at hand",
    "workers": "{} workers",
    "persistent": "workers that stay",
    "saving": "no saving",
    "logging": "no logging",
    "evaluation": "no evaluation",
    "gc": "no garbage collection",
    "freeze": "gc.freeze()",
    "threads": "{} threads",
    "fused": "a fused optimizer step",
    "foreach": "an optimizer step over lists of parameters",
    "padding": "no padding",
    "needless_gradients": "no needless gradients",
    "anomaly": "no anomaly detection",
    "profiler": "no profiler",
    "two_backwards": "one backward over each graph",
    "float64": "fp32",
    "unused_rows": "no unused rows in the optimizer",
    "checkpointing": "no activation checkpointing",
    "communication": "no exchange between ranks",
    "graphs": "no graphs that are kept",
    "bf16": "bf16",
    "tf32": "TF32",
    "together": "TF32 and another optimizer step together",
    "recompilation": "dynamic shapes",
    "compile": "torch.compile",
}
"""What is tried where a cause is removed."""


def together(seen: Observation, tried: Collection[str]) -> Suspect | None:
    """TF32 and a faster optimizer step at once, after each by itself; None where they were not both tried.

    The host launches while the GPU computes. Where both take about as long, a mend of one alone gives little: the
    other is waited for.

    Args:
        seen: The steps.
        tried: The switches that were measured.
    """
    if seen.facts.device != "cuda" or "tf32" not in tried or not {"fused", "foreach"} & {*tried}:
        return None
    return Suspect(switch="together", part="forward", worth=LEAST_SHARE, settle=CUDA_SETTLE)


def tried_words(key: str) -> str:
    """What is tried, by the key of a suspect: `4 workers`, `no saving`."""
    switch, _, setting = key.partition("=")
    return TRIED[switch].format(setting)


def find_suspects(seen: Observation) -> list[Suspect]:
    """The causes to remove, the largest first; compiling, which takes long, at the end."""
    found = [*_of_loader(seen), *_of_parts(seen), *_of_process(seen)]
    return sorted(found, key=lambda one: (one.switch == "compile", -one.worth))


def _of_loader(seen: Observation) -> list[Suspect]:
    loader, share = seen.facts.loader, seen.share("data")
    if loader is None or share < LEAST_SHARE:
        return []
    more = min(MOST_WORKERS, max(2, seen.facts.cores, 2 * loader.workers))
    found = []
    if not loader.iterable and more > loader.workers:
        found.append(workers_suspect(seen, more))
    worth = found[0].worth - 0.001 if found else share  # the mend goes before its bound
    cycle = _cycle(seen, "data")
    first, back = cycle if loader.workers else 1, made_ahead(loader)  # first: the epoch whose workers run already
    found.append(Suspect(switch="batches", part="data", worth=worth, cycle=cycle, settle=first, settle_back=back))
    epoch = loader.epoch_steps
    if loader.workers and not loader.persistent and epoch and loader.start_s > LEAST_SHARE * seen.mean_s:
        steps, worth = math.ceil(epoch), min(share, loader.start_s / seen.mean_s) + 0.01
        both = 2 * steps
        found.append(Suspect(switch="persistent", part="data", worth=worth, cycle=steps, settle=both, settle_back=both))
    return found


def _cycle(seen: Observation, part: Part) -> int:
    """Steps after which a part comes again."""
    own = seen.part(part)
    return 1 if own is None or own.events >= EACH_STEP * seen.steps else own.every


def made_ahead(loader: LoaderFacts) -> int:
    """Steps until the batches are used up that the script's own workers have made while others were given."""
    return loader.workers * PREFETCH + 1


def workers_suspect(seen: Observation, workers: int) -> Suspect:
    """The loader with so many workers: their first batches come together, and late."""
    loader, share, cycle = seen.facts.loader, seen.share("data"), _cycle(seen, "data")
    assert loader is not None
    return Suspect(
        switch="workers",
        setting=workers,
        part="data",
        worth=share * (1 - max(1, loader.workers) / workers),
        cycle=cycle * math.ceil(workers / cycle),
        settle=workers + 1,
        settle_back=made_ahead(loader),
    )


def _of_parts(seen: Observation) -> list[Suspect]:
    found = []
    for one in seen.parts:
        if one.part in ("saving", "logging", "evaluation", "gc") and one.share >= LEAST_SHARE:
            switch, cycle = "freeze" if one.part == "gc" else one.part, _cycle(seen, one.part)
            found.append(Suspect(switch=switch, part=one.part, worth=one.share, cycle=cycle))
            if one.part == "gc":  # after the one that keeps a collector
                found.append(Suspect(switch="gc", part="gc", worth=one.share - 0.001, cycle=cycle))
    return found


def _of_process(seen: Observation) -> list[Suspect]:
    facts, found = seen.facts, []
    settle = CUDA_SETTLE if facts.device == "cuda" else 1
    work = sum(seen.share(part) for part in ("forward", "loss", "backward", "optimizer"))
    if facts.device == "cpu" and facts.threads != facts.cores:
        worth = work * (1 - 1 / max(1, facts.threads / facts.cores, facts.cores / facts.threads)) / 2
        found.append(
            Suspect(switch="threads", setting=facts.cores, part="forward", worth=worth, settle=2, settle_back=2)
        )
    if facts.can_fuse and seen.share("optimizer") >= LEAST_OPTIMIZER:
        found.append(Suspect(switch="fused", part="optimizer", worth=seen.share("optimizer") / 2, settle=settle))
    elif facts.can_foreach and facts.device == "cuda" and seen.share("optimizer") >= LEAST_OPTIMIZER:
        found.append(Suspect(switch="foreach", part="optimizer", worth=seen.share("optimizer") / 2, settle=settle))
    if facts.unused_rows and facts.optimizer is not None and facts.exchange is None:
        worth = seen.share("optimizer") * facts.unused_share
        found.append(Suspect(switch="unused_rows", part="optimizer", worth=worth))
    if facts.float64 and facts.exchange is None:
        found.append(Suspect(switch="float64", part="forward", worth=work / 2, settle=2, settle_back=2))
    if facts.recomputed:
        found.append(Suspect(switch="checkpointing", part="backward", worth=seen.share("forward"), settle=2))
    if facts.padding >= LEAST_PADDING:
        found.append(Suspect(switch="padding", part="forward", worth=facts.padding * work))
    if facts.needless and facts.exchange is None:  # DDP waits for all gradients that it knows
        found.append(Suspect(switch="needless_gradients", part="backward", worth=seen.share("backward") / 2, settle=2))
    if facts.anomaly:
        found.append(Suspect(switch="anomaly", part="backward", worth=work / 2))
    again = facts.backward_again_s / seen.mean_s
    if again >= LEAST_SHARE and facts.exchange is None:
        found.append(Suspect(switch="two_backwards", part="backward", worth=again, settle=settle, settle_back=settle))
    if facts.profiled:
        worth, cycle = facts.profiled * (work + seen.share("loop")) / 2, _cycle(seen, "loop")
        found.append(
            Suspect(switch="profiler", part="loop", worth=worth, cycle=cycle, settle=settle, settle_back=settle)
        )
    for switch, times in (("tf32", facts.tf32_gain), ("bf16", facts.bf16_gain)):
        if times is not None and times >= LEAST_BF16:
            products = seen.share("forward") + seen.share("backward")
            found.append(Suspect(switch=switch, part="forward", worth=products * (1 - 1 / times) / 2, settle=settle))
    if facts.exchange is not None and facts.exchange.can_go:  # what a rank costs the others shows itself only without
        found.append(Suspect(switch="communication", part="communication", worth=1.0, cycle=4, settle=2, settle_back=2))
    fusable = sum(one.share for one in seen.operations if one.kind in FUSABLE)
    if fusable >= LEAST_FUSABLE and not facts.compiled and facts.exchange is None:
        found.append(Suspect(switch="compile", part="forward", worth=fusable / 2, settle=2))
    memory = seen.memory
    if memory is not None and memory.growth_bytes >= LEAST_GROWTH_BYTES and any(one.graphs for one in memory.kept):
        found.append(Suspect(switch="graphs", part="loop", worth=LEAST_SHARE))
    return [one for one in found if one.worth >= LEAST_SHARE / 2]
