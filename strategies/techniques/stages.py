"""Where a pipeline is cut: contiguous blocks per stage, so that the costliest stage costs least. Loads no torch."""

from __future__ import annotations

from collections.abc import Sequence


def cut_stages(
    block_costs: Sequence[float], num_stages: int, *, first_cost: float = 0.0, last_cost: float = 0.0
) -> list[tuple[int, int]]:
    """Cuts a row of blocks into stages of at least one block each.

    The largest cost of a stage is as small as it can be (dynamic programming over the cuts); among equal cuts the
    later stages get the fewer blocks, since the earlier ones hold more micro-batches in flight either way.

    Args:
        block_costs: What each block costs, in any unit.
        num_stages: Stages, at most as many as blocks.
        first_cost: What the first stage bears besides its blocks (embeddings), in the same unit.
        last_cost: What the last stage bears besides (output head, loss).

    Returns:
        (first block, one past the last block) per stage.

    Raises:
        ValueError: more stages than blocks.
    """
    count = len(block_costs)
    if not 1 <= num_stages <= count:
        raise ValueError(f"{count} blocks cannot make {num_stages} stages")
    total = [0.0]
    for cost in block_costs:
        total.append(total[-1] + cost)
    # best[i]: the smallest largest cost of the stages so far, when they hold the first i blocks
    best = [first_cost + total[i] for i in range(count + 1)]
    cuts: list[list[int]] = [[0] * (count + 1)]
    for stage in range(1, num_stages):
        extra = last_cost if stage == num_stages - 1 else 0.0
        row, cut = [float("inf")] * (count + 1), [0] * (count + 1)
        for stop in range(stage + 1, count + 1):
            for start in range(stage, stop):
                worst = max(best[start], total[stop] - total[start] + extra)
                if worst <= row[stop]:
                    row[stop], cut[stop] = worst, start
        best = row
        cuts.append(cut)
    bounds = [count]
    for cut in reversed(cuts[1:]):
        bounds.append(cut[bounds[-1]])
    bounds.append(0)
    bounds.reverse()
    return list(zip(bounds, bounds[1:], strict=False))
