"""The estimate of a cluster on the screen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from autoplan.units import format_number, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

GIB = 2**30
# parts whose names say too little beside others
NAMES = {"memory": "passes over memory", "step": "optimizer step", "bubble": "pipeline bubble"}


def show_estimate(document: dict[str, Any], screen: Console) -> None:
    """Prints an estimate: tables on a terminal and off it."""
    for text in estimate_lines(document):
        screen.print(text, markup=False, soft_wrap=True)


def estimate_lines(document: dict[str, Any]) -> Iterator[str]:
    """The lines of an estimate."""
    model, cluster = document["model"], document.get("cluster")
    size, unit = f"{model['parameters'] / 1e9:.3g}B parameters", _unit(document)
    where = "" if cluster is None else f" on {cluster['num_gpus']} x {cluster['chip']}"
    batch = f"sequences of {document['seq_len']} tokens" if unit == "tokens" else unit
    yield f"{model['name']}: {size}{where}, {document['global_batch']} {batch} a step"
    yield from (f"  assumed: {line}" for line in document["assumed"])
    if document["calibration"] is not None:
        yield f"  {document['calibration']}"
    if cluster is None:
        yield from rent_lines(document["rent"])
        return
    best = document["best"][0]
    shared = " ".join(f"{knob}={best['layout'][knob]}" for knob in ("precision", "compile", "attention", "loss"))
    yield f"  with {shared} optimizer={document['optimizer']} (--fix changes them)"
    if best["other_inputs"]:
        other = " ".join(f"{name}={value}" for name, value in best["other_inputs"].items())
        yield f"  not knobs of autoplan, so no search can take them: {other}"
    if document["fixed"]:
        yield f"  fixed: {' '.join(f'{knob}={value}' for knob, value in document['fixed'].items())}"
    if cluster["input_tokens_per_s"] is not None:
        yield f"  input: {cluster['input_tokens_per_s']:,.0f} {unit}/s from the loaders of a node"
    count = _count(document["configurations_estimated"], "layout")
    fitting = f"{document['configurations_that_fit']:,} fit"
    yield f"  {count} estimated in {document['estimating_s']:.3f} s, {fitting}"
    yield from _layouts(document["best"], unit)
    yield from _parts(best, unit)
    yield from training_lines(document)
    smallest = document["smallest_cluster"]
    if smallest is not None:
        step = f"{smallest['step_time_s']:.3g} s a step ({describe_layout(smallest)})"
        yield f"\nfewest GPUs that hold it: {smallest['num_gpus']}, at {step}"
    yield from _scaling(document["scaling"], unit)
    families: dict[str, list[str]] = {}
    for entry in document["why_others_lose"]:
        families.setdefault(entry["why"], []).append(entry["family"])
    if families:
        yield "\nwhy the others lose (the best layout of each family)"
    yield from (f"  {', '.join(names)}: {why}" for why, names in families.items())
    if "anchor" in document:
        yield from _anchor(document)


def _anchor(document: dict[str, Any]) -> Iterator[str]:
    """The anchor, where each part comes from, and the options that hand the best layout to a search."""
    anchor = document["anchor"]
    kind = "the same kind of device" if anchor["same_kind"] else "another kind of device"
    yield f"\nanchor: {anchor['trials']} trials on {anchor['ranks']} x {anchor['device']}; this is {kind}"
    yield from (f"  {part}: {source}" for part, source in anchor["sources"].items())
    yield f"\nto search from it there: autoplan search {document['best'][0]['search_flags']} ..."


def _unit(document: dict[str, Any]) -> str:
    return str(document["model"].get("unit", "tokens"))


def rent_lines(rent: dict[str, Any]) -> Iterator[str]:
    """What to rent: the front of time and cost, and the fewest GPUs of each kind that hold the training."""
    spent = "GPU hours" if rent["currency"] is None else "cost"
    yield f"\nwhat to rent for {_tokens(rent['tokens'])} tokens: nothing is faster and has a lower {spent}"
    for option in rent["options"]:
        if option["on_front"]:
            yield f"  {describe_option(option, rent['currency'])} ({describe_layout(option)})"
    for option in sorted((one for one in rent["options"] if one["smallest"]), key=lambda one: one["gpu_hours"]):
        yield f"  fewest that hold it: {describe_option(option, rent['currency'])}"
    yield from (f"  {chip}: {why}" for chip, why in rent["left_out"].items())


def describe_option(option: dict[str, Any], currency: str | None) -> str:
    """How many of which GPUs, how long and at what cost, with intervals."""
    hours = [format_number(option[f"hours{end}"]) for end in ("", "_low", "_high")]
    text = f"{option['num_gpus']} x {option['chip']}: {hours[0]} h ({hours[1]} to {hours[2]}), "
    if currency is None:
        return text + f"{format_number(option['gpu_hours'])} GPU hours"
    cost = [format_number(option[f"cost{end}"]) for end in ("", "_low", "_high")]
    return text + f"{cost[0]} {currency} ({cost[1]} to {cost[2]})"


def describe_layout(entry: dict[str, Any]) -> str:
    """The knobs of a layout."""
    layout = entry["layout"]
    text = f"tp={layout['tp']} pp={layout['pp']} dp_replicate={layout['dp_replicate']} dp_shard={layout['dp_shard']}"
    other = entry.get("other_inputs", {})
    if "sharding" in other:
        text += f" sharding={other['sharding']}"
    elif layout["dp_shard"] > 1:
        text += f" reshard_after_forward={layout['reshard_after_forward']}"
    text += f" micro_batch={layout['micro_batch']}"
    if layout["gradient_sync"] == "every":
        text += " gradient_sync=every"
    text += f" checkpointing={layout['checkpointing']}"
    return text + (f" virtual_stages={layout['virtual_stages']}" if layout["virtual_stages"] > 1 else "")


def training_lines(document: dict[str, Any]) -> Iterator[str]:
    """How long the training takes, and what to rent for it."""
    training = document["training"]
    if training is None:
        yield "\ntime to train and cost: give --tokens, and --prices"
        return
    days = [training[f"days{end}"] for end in ("", "_low", "_high")]
    short = days[0] < 2
    times = [format_seconds(86_400 * value) if short else f"{value:.1f}" for value in days]
    yield (
        f"\n{_tokens(training['tokens'])} {_unit(document)}: {training['steps']:,} steps, "
        f"{times[0]}{'' if short else ' days'} ({times[1]} to {times[2]}), "
        f"{format_number(training['gpu_hours'])} GPU hours"
    )
    if document["rent"] is not None:  # an anchor gives none
        yield from rent_lines(document["rent"])


def _layouts(best: list[dict[str, Any]], unit: str) -> Iterator[str]:
    yield "\nbest layouts (step time with an interval of 90 %)"
    for number, entry in enumerate(best, start=1):
        yield (
            f"  {number}. {describe_layout(entry)}: {entry['step_time_s']:.3g} s ({entry['step_time_low_s']:.3g} to "
            f"{entry['step_time_high_s']:.3g}), {entry['tokens_per_s']:,.0f} {unit}/s, MFU {entry['mfu']:.0%}, "
            f"HFU {entry['hfu']:.0%}, {entry['peak_memory_bytes'] / GIB:.1f} GiB a GPU"
        )


def _parts(best: dict[str, Any], unit: str) -> Iterator[str]:
    step, peak = best["step_time_s"], best["peak_memory_bytes"]
    times = ", ".join(
        f"{NAMES.get(name, name)} {s:.3g} s ({s / step:.0%})"
        for name, s in best["time_parts_s"].items()
        if s / step >= 0.005
    )
    memory = ", ".join(
        f"{NAMES.get(name, name)} {b / GIB:.1f} GiB" for name, b in best["memory_parts_bytes"].items() if b >= GIB / 20
    )
    yield f"\nthe best one's step: {times}; {best['bound'].replace('_', ' ')} binds"
    yield f"the best one's memory: {memory}; {peak / GIB:.1f} GiB in all"
    needed = f"{best['input_tokens_per_s_needed']:,.0f} {unit}/s"
    if best["bound"] == "input":
        yield f"the best one's input: too slow; the loaders of a node would have to deliver {needed}"
    else:
        yield f"the best one's input: keeps up if the loaders of a node deliver {needed}"


def _scaling(entries: list[dict[str, Any]], unit: str) -> Iterator[str]:
    yield "\nhow it scales, the global batch kept"
    for entry in entries:
        gpus = _count(entry["num_gpus"], "GPU")
        if entry["step_time_s"] is None:
            yield f"  {gpus}: {entry['why']}"
        else:
            yield (
                f"  {gpus}: {entry['step_time_s']:.3g} s, {entry['tokens_per_s']:,.0f} {unit}/s, MFU {entry['mfu']:.0%}"
                f"{', input binds' if entry['bound'] == 'input' else ''} ({describe_layout(entry)})"
            )


def _tokens(number: float) -> str:
    for scale, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if number >= scale:
            return f"{number / scale:g}{letter}"
    return f"{number:g}"


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}" + ("s" if number != 1 else "")
