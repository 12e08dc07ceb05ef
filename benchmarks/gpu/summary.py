"""The figures of a GPU session that documents quote, from the files of its archive."""

from __future__ import annotations

import json
import math
import platform
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def summarise(folder: Path) -> dict[str, Any]:
    """Every step with its status, the rounds, the trials beside their predictions, and the searches."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
    return {
        "device": device,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "steps": list(_lines(folder / "steps.jsonl")),
        "rounds": rounds(folder),
        "trials": {path.name.split(".trials")[0]: trials(path) for path in sorted(folder.glob("*.trials.jsonl"))},
        "searches": {
            path.name.removesuffix(".search.out"): found
            for path in sorted(folder.glob("*.search.out"))
            if (found := _search(path)) is not None
        },
    }


def rounds(folder: Path) -> dict[str, Any]:
    """Tokens per second of each program and round, and the ratios within the rounds that are complete."""
    speeds: dict[str, dict[str, float]] = {}
    for path in sorted(folder.glob("round*.*.out")):
        number, name, _ = path.name.split(".")
        try:
            speeds.setdefault(number, {})[name] = json.loads(path.read_text().splitlines()[-1])["tokens_per_s"]
        except (ValueError, IndexError, KeyError):
            continue
    found: dict[str, Any] = {"tokens_per_s": speeds}
    for other in ("hand", "baseline"):
        ratios = [one["plan"] / one[other] for one in speeds.values() if "plan" in one and other in one]
        if ratios:
            middle = math.exp(statistics.median(map(math.log, ratios)))
            found[f"plan_over_{other}"] = {"median": middle, "by_round": ratios}
    return found


def trials(path: Path) -> list[dict[str, Any]]:
    """A line for each trial: how it ended, how fast, the phases, and predicted over measured."""
    rows = []
    for line in _lines(path):
        trial, prediction = line["trial"], line.get("prediction") or {}
        memory, step = trial.get("peak_memory") or {}, (trial.get("step_time_s") or {}).get("median")
        tokens = (trial.get("tokens_per_s") or {}).get("median")
        allocated = memory.get("allocated_bytes") or memory.get("resident_bytes")
        driver = memory.get("driver_bytes") or memory.get("resident_bytes")
        rows.append(
            {
                "config": trial["config"],
                "outcome": trial["outcome"],
                "reason": trial.get("reason"),
                "tokens_per_s": tokens,
                "seconds_spent": trial.get("seconds_spent"),
                "phase_seconds": trial.get("phase_seconds"),
                "allocated_bytes": allocated,
                "predicted_over_measured_memory": _ratio(prediction.get("peak_memory_bytes"), driver),
                "predicted_over_measured_time": _ratio(prediction.get("step_time_s"), step),
                "left_behind": line.get("left_behind"),
            }
        )
    return rows


def _search(path: Path) -> dict[str, Any] | None:
    try:
        document = json.loads(path.read_text())
    except ValueError:
        return None
    plan = document.get("plan") or {}
    return {
        "status": document.get("status"),
        "reason": document.get("reason"),
        "config": plan.get("config"),
        "tokens_per_s": (plan.get("measurement") or {}).get("tokens_per_s"),
        "speedup_over_plain_fp32": plan.get("speedup"),
        "spent_s": document.get("spent_s"),
        "trials": len(document.get("trials", ())),
        "notes": document.get("notes"),
    }


def _ratio(predicted: float | None, measured: float | None) -> float | None:
    return predicted / measured if predicted and measured else None


def _lines(path: Path) -> Iterable[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
