"""The estimate of a cluster on the screen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

GIB = 2**30


def show_estimate(document: dict[str, Any], screen: Console) -> None:
    """Prints an estimate: tables on a terminal and off it."""
    model, cluster = document["model"], document["cluster"]
    _say(
        screen,
        f"{model['name']}: {model['parameters'] / 1e9:.2f}B parameters on {cluster['num_gpus']} x {cluster['chip']}, "
        f"{document['global_batch']} sequences of {document['seq_len']} tokens a step",
    )
    for line in document["assumed"]:
        _say(screen, f"  assumed: {line}")
    _say(
        screen,
        f"  {document['configurations_priced']} layouts priced in {document['pricing_s']:.3f} s, "
        f"{document['configurations_that_fit']} fit",
    )
    _layouts(document["best"], screen)
    best = document["best"][0]
    _parts(best, screen)
    training = document["training"]
    if training is not None:
        cost = "" if training["cost"] is None else f", cost {training['cost']:,.0f}"
        _say(
            screen,
            f"\n{training['tokens']:.3g} tokens: {training['days']:.1f} days ({training['days_low']:.1f} to "
            f"{training['days_high']:.1f}), {training['gpu_hours']:,.0f} GPU hours{cost}",
        )
    smallest = document["smallest_cluster"]
    if smallest is not None:
        _say(screen, f"\nfewest GPUs that hold it: {smallest['num_gpus']} ({_layout(smallest['layout'])})")
    _scaling(document["scaling"], screen)
    _say(screen, "\nwhy the others lose")
    for entry in document["why_others_lose"]:
        _say(screen, f"  {entry['family']}: {entry['why']}")


def _layout(layout: dict[str, Any]) -> str:
    text = f"tp={layout['tp']} pp={layout['pp']} dp={layout['dp_replicate']}x{layout['dp_shard']} {layout['sharding']}"
    text += f" micro_batch={layout['micro_batch']} checkpointing={layout['checkpointing']}"
    return text + (f" virtual_stages={layout['virtual_stages']}" if layout["virtual_stages"] > 1 else "")


def _layouts(best: list[dict[str, Any]], screen: Console) -> None:
    _say(screen, "\nbest layouts (step time with an interval of 90 %)")
    for number, entry in enumerate(best, start=1):
        _say(
            screen,
            f"  {number}. {_layout(entry['layout'])}: {entry['step_time_s']:.3g} s ({entry['step_time_low_s']:.3g} to "
            f"{entry['step_time_high_s']:.3g}), {entry['tokens_per_s']:,.0f} tokens/s, MFU {entry['mfu']:.0%}, "
            f"{entry['peak_memory_bytes'] / GIB:.1f} GiB a GPU",
        )


def _parts(best: dict[str, Any], screen: Console) -> None:
    step, peak = best["step_time_s"], best["peak_memory_bytes"]
    times = ", ".join(f"{name} {s:.3g} s ({s / step:.0%})" for name, s in best["time_parts_s"].items() if s > 0)
    memory = ", ".join(f"{name} {b / GIB:.1f} GiB" for name, b in best["memory_parts_bytes"].items() if b > 0)
    _say(screen, f"\nthe best one's step: {times}; {best['bound']} binds")
    _say(screen, f"the best one's memory: {memory}; {peak / GIB:.1f} GiB in all")


def _scaling(entries: list[dict[str, Any]], screen: Console) -> None:
    _say(screen, "\nhow it scales, the global batch kept")
    for entry in entries:
        if entry["step_time_s"] is None:
            _say(screen, f"  {entry['num_gpus']} GPUs: {entry['why']}")
        else:
            _say(
                screen,
                f"  {entry['num_gpus']} GPUs: {entry['step_time_s']:.3g} s, {entry['tokens_per_s']:,.0f} tokens/s, "
                f"MFU {entry['mfu']:.0%} ({_layout(entry['layout'])})",
            )


def _say(screen: Console, text: str) -> None:
    screen.print(text, soft_wrap=True)
