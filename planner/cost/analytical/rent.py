"""Advice on what to rent: which GPUs, how many, for how long, at what cost; and the fewest that hold the training."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoplan.errors import UsageError
from autoplan.planner.cost.analytical.answer import best_on, show_layout
from autoplan.planner.cost.analytical.cluster import find_chip
from autoplan.planner.cost.analytical.layout_search import Asked, powers

MOST_GPUS = 512
"""How many of a kind are looked at if no cluster says it."""

_PRICE = re.compile(r"(\d+\.?\d*|\.\d+)\s*([^\s\d./]+)\s*/\s*(?:h|hour)")
_HINT = "Write the price of one GPU for an hour, with its currency: H100: 2.5 USD/h"


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices of a GPU hour by the chip's name in the catalogue, in one currency; `names` are as the user wrote them."""

    currency: str
    per_hour: Mapping[str, float]
    names: tuple[str, ...]


def read_prices(source: str | Path | Mapping[str, Any]) -> Prices:
    """Prices from a YAML file, or a mapping: `H100: 2.5 USD/h`.

    Raises:
        UsageError: the file cannot be read; or a line has no price with a unit, or another currency, or its chip is not
            in the catalogue, or stands twice.
    """
    given, where = (source, "prices") if isinstance(source, Mapping) else (_read_yaml(Path(source)), str(source))
    per_hour: dict[str, float] = {}
    currencies: dict[str, str] = {}
    for name, text in given.items():
        match = _PRICE.fullmatch(str(text).strip())
        if match is None:
            raise UsageError(f"{where}: {name}: {text} is no price with a unit", hint=_HINT)
        try:
            chip = find_chip(str(name)).sheet.name
        except UsageError as error:
            raise UsageError(f"{where}: {name}: {error.message}", hint=error.hint) from None
        value, currency = float(match.group(1)), match.group(2)
        if not value > 0:
            raise UsageError(f"{where}: {name}: {text} is not above 0", hint=_HINT)
        if chip in per_hour:
            raise UsageError(f"{where}: {name}: the {chip} has a price already", hint="Give each kind one price.")
        per_hour[chip] = value
        currencies.setdefault(currency, str(name))
    if len(currencies) > 1:
        text = " and ".join(f"{name} is in {currency}" for currency, name in currencies.items())
        raise UsageError(f"{where}: {text}", hint="Give all prices in one currency.")
    if not per_hour:
        raise UsageError(f"{where} has no price", hint=_HINT)
    return Prices(next(iter(currencies)), per_hour, tuple(map(str, given)))


def _read_yaml(path: Path) -> Mapping[str, Any]:
    import yaml

    try:
        read = yaml.safe_load(path.read_text())
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", hint="Give a YAML file of prices.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not YAML: {' '.join(str(error).split())}", hint=_HINT) from error
    if not isinstance(read, dict):
        raise UsageError(f"{path} has no prices in it", hint=_HINT)
    return read


def advise(questions: Sequence[Asked], tokens: float, prices: Prices | None, most_gpus: int) -> dict[str, Any]:
    """The options of each question's kind of GPU, fastest first; those on the front have nothing faster and cheaper.

    Times and costs are those of all tokens, with intervals of 90 %. Without prices, cost is None and GPU hours count.

    Args:
        questions: One for each kind of GPU.
        tokens: To train on.
        prices: Of each kind; None: not known.
        most_gpus: The most of one kind.
    """
    options = [option for question in questions for option in _options(question, tokens, prices, most_gpus)]
    options.sort(key=lambda option: (option["hours"], option["gpu_hours"]))
    cheapest = math.inf
    for option in options:
        spent = option["gpu_hours"] if prices is None else option["cost"]
        option["on_front"] = spent < cheapest
        cheapest = min(cheapest, spent)
    found = {option["chip"] for option in options}
    left_out = [question.cluster.chip for question in questions if question.cluster.chip not in found]
    return {
        "tokens": tokens,
        "currency": None if prices is None else prices.currency,
        "options": options,
        "left_out": dict.fromkeys(left_out, f"holds no layout on up to {most_gpus} GPUs with a known link"),
    }


def _options(question: Asked, tokens: float, prices: Prices | None, most_gpus: int) -> Iterator[dict[str, Any]]:
    """Parts of a node and nodes of one kind, by powers of two, and the cluster itself, wherever something fits."""
    steps = tokens / (question.global_batch * question.seq_len)
    counts = {count for count in powers(most_gpus) if count < question.cluster.gpus_per_node}
    counts |= {question.cluster.gpus_per_node * nodes for nodes in powers(most_gpus // question.cluster.gpus_per_node)}
    smallest = True
    for count in sorted(counts | {min(question.cluster.num_gpus, most_gpus)}):
        answer = best_on(question, count)
        if answer is None or answer.best is None:
            continue
        best = show_layout(question, answer, answer.best)
        hours, low, high = (steps * best[f"step_time{end}_s"] / 3600 for end in ("", "_low", "_high"))
        price = None if prices is None else count * prices.per_hour[find_chip(question.cluster.chip).sheet.name]
        yield {
            "chip": question.cluster.chip,
            "num_gpus": count,
            "smallest": smallest,
            "hours": hours,
            "hours_low": low,
            "hours_high": high,
            "gpu_hours": hours * count,
            "cost": None if price is None else hours * price,
            "cost_low": None if price is None else low * price,
            "cost_high": None if price is None else high * price,
            **{name: best[name] for name in ("layout", "other_inputs", "step_time_s", "tokens_per_s", "mfu")},
            "peak_memory_bytes": best["peak_memory_bytes"],
        }
        smallest = False
