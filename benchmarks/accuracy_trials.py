"""The cost model against recorded trials: what was predicted before each, and what it then measured.

Part of `make accuracy` (TRIALS=...): reads documents of `autoplan search --json` and the record.jsonl of a store.
Each prediction is the one the search held before that trial ran, so it had learnt from the trials before it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
TOP = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """One search: its name, and its trials as written."""

    name: str
    trials: list[dict[str, Any]]


def find_records(paths: Sequence[Path]) -> list[Path]:
    """The files meant: each file itself; below a folder, its record.jsonl files, else its search documents (*.json)."""
    found: list[Path] = []
    for path in paths:
        if path.is_file():
            found.append(path)
            continue
        records = sorted(path.rglob("record.jsonl"))
        found += records or [p for p in sorted(path.rglob("*.json")) if read_record(p) is not None]
    return found


def read_record(path: Path) -> Recorded | None:
    """A search's trials from its document or its record; None: the file is no such thing.

    Raises:
        OSError: it cannot be read.
    """
    text = path.read_text()
    folder = path.parent
    if re.match(r"[0-9a-f]{16}(\.old-|$)", folder.name):  # a study in a store of several: the store has the name
        folder = folder.parent
    name = folder.name if path.name in ("record.jsonl", "search.json") else path.stem
    try:
        if path.suffix == ".jsonl":
            lines = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
            return Recorded(name=name, trials=[line["trial"] for line in lines if line.get("kind") == "trial"])
        document = json.loads(text)
    except ValueError:
        return None
    # a document that a benchmark kept may hold the search's own under a name
    for candidate in (document, document.get("search") if isinstance(document, dict) else None):
        trials = candidate.get("trials") if isinstance(candidate, dict) else None
        if isinstance(trials, list) and all(isinstance(trial, dict) and "outcome" in trial for trial in trials):
            return Recorded(name=name, trials=trials)
    return None


def score_trials(trials: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All figures of one search. Repeats of a configuration (finalists) count each with its own prediction.

    Rank correlation (Spearman's) and top-5 recall are over the last prediction and the median time of each
    configuration; errors count trials that ended ok. Called safe: ran out, though the interval lay under the limit.
    """
    timed = [t for t in trials if t["outcome"] == "ok" and t.get("step_time_s") and t.get("predicted_step_time_s")]
    predicted = np.array([float(t["predicted_step_time_s"]) for t in timed])
    measured = np.array([float(t["step_time_s"]["median"]) for t in timed])
    ran = [with_peak(t) for t in trials if t["outcome"] == "ok" and t.get("predicted_peak_memory_bytes")]
    ran = [t for t in ran if t["peak_memory_bytes"]]
    memory = np.array([t["predicted_peak_memory_bytes"] / t["peak_memory_bytes"] - 1 for t in ran])
    once: dict[str, tuple[float, list[float]]] = {}
    for trial, guess, seconds in zip(timed, predicted, measured, strict=True):
        key = json.dumps(trial["config"], sort_keys=True)
        once[key] = (float(guess), [*once.get(key, (0.0, []))[1], float(seconds)])
    guesses = np.array([guess for guess, _ in once.values()])
    times = np.array([float(np.median(seconds)) for _, seconds in once.values()])
    errors = predicted / measured - 1
    late = errors[3:]
    return {
        "trials": len(trials),
        "timed": len(timed),
        "configurations": len(once),
        "time_mean": _mean(np.abs(errors)),
        "time_bias": _mean(errors),
        "time_mean_after_3": _mean(np.abs(late)),
        "memory_runs": len(memory),
        "memory_mean": _mean(np.abs(memory)),
        "memory_bias": _mean(memory),
        "out_of_memory": sum(t["outcome"] == "out_of_memory" for t in trials),
        "covered": _covered(timed, "step_time", "s", [float(v) for v in measured]),
        "memory_covered": _covered(ran, "peak_memory", "bytes", [t["peak_memory_bytes"] for t in ran]),
        "called_safe": sum(called_safe(t) for t in trials if t["outcome"] == "out_of_memory"),
        "rank": rank_correlation(guesses, times) if len(once) > 2 else None,
        "top5": float(times[np.argsort(guesses)[:TOP]].min() <= times.min()) if len(once) > TOP else None,
    }


def with_peak(trial: dict[str, Any]) -> dict[str, Any]:
    """A trial with its peak as one figure: the document has it, the record has the parts."""
    if "peak_memory_bytes" in trial:
        return trial
    parts = trial.get("peak_memory") or {}
    names = ("driver_bytes", "reserved_bytes", "resident_bytes")
    return trial | {"peak_memory_bytes": next((parts[n] for n in names if parts.get(n) is not None), None)}


def rank_correlation(a: Array, b: Array) -> float:
    """Spearman's: Pearson's over ranks, ties at their mean rank."""

    def ranks(values: Array) -> Array:
        below = (values[:, None] > values[None, :]).sum(1)
        same = (values[:, None] == values[None, :]).sum(1)
        return np.asarray(below + (same - 1) / 2, dtype=np.float64)

    first, second = ranks(a), ranks(b)
    if first.std() == 0 or second.std() == 0:
        return float("nan")
    return float(np.corrcoef(first, second)[0, 1])


def _mean(values: Array) -> float | None:
    return float(values.mean()) if len(values) else None


def called_safe(trial: dict[str, Any]) -> bool:
    """Whether the whole interval of the predicted peak lay under the limit that the trial then ran into."""
    limit = (trial.get("peak_memory") or {}).get("limit_bytes")
    high = trial.get("predicted_peak_memory_high_bytes")
    return limit is not None and high is not None and high <= limit


def _covered(trials: Sequence[dict[str, Any]], what: str, unit: str, measured: Sequence[float]) -> float | None:
    """Share of the measurements inside their predicted intervals, of those that were recorded with one."""
    inside = []
    for trial, value in zip(trials, measured, strict=True):
        low, high = (trial.get(f"predicted_{what}_{end}_{unit}") for end in ("low", "high"))
        if low is not None and high is not None:
            inside.append(low <= value <= high)
    return float(np.mean(inside)) if inside else None


def show_trials(paths: Sequence[Path], *, markdown: bool) -> None:
    """Prints the table of recorded searches, and which files were none."""
    head = "recorded search | trials | timed | time: mean | bias | mean after 3 | in interval | rank correlation"
    head += " | top-5 | memory runs | mean | bias | in interval | out of memory | called safe"
    files = find_records(paths)
    if not files:
        print(f"\nno recorded search in {', '.join(str(path) for path in paths)}")
        return
    print(f"\n| {head} |\n|" + "---|" * (head.count("|") + 1) if markdown else f"\n{head}")
    skipped = []
    for path in files:
        record = read_record(path)
        if record is None:
            skipped.append(path.name)
            continue
        s = score_trials(record.trials)
        cells = [record.name, str(s["trials"]), str(s["timed"])]
        cells += [_percent(s[k]) for k in ("time_mean", "time_bias", "time_mean_after_3", "covered")]
        cells += ["-" if s["rank"] is None else f"{s['rank']:.2f}", _percent(s["top5"]), str(s["memory_runs"])]
        cells += [_percent(s[k]) for k in ("memory_mean", "memory_bias", "memory_covered")]
        cells += [str(s["out_of_memory"]), str(s["called_safe"])]
        print(f"| {' | '.join(cells)} |" if markdown else " | ".join(cells))
    if skipped:
        print(f"no record of a search: {', '.join(skipped)}")


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
