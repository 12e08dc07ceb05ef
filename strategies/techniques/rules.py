"""Which combinations of knobs no run can have: the rules of all techniques, in one place. Loads no torch.

The rules of a technique stand in the file beside it (`compilation_rules.py` beside `compilation.py`), since a
technique's own file loads torch and the planner's process, which makes the space, does not.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.techniques import (
    attention_rules,
    compilation_rules,
    data_parallel_rules,
    fp8_rules,
    kernels_rules,
    offload_rules,
    parameters_rules,
    pipeline_rules,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """The rules of one technique.

    Attributes:
        reads: The knobs that they read.
        incompatible: The reason against a configuration, or None; with the global batch also by its micro-batches.
    """

    reads: tuple[str, ...]
    incompatible: Callable[[TrainingConfig, int | None], str | None]


RULES = (
    Rule(reads=attention_rules.READS, incompatible=attention_rules.incompatible),
    Rule(reads=compilation_rules.READS, incompatible=compilation_rules.incompatible),
    Rule(reads=data_parallel_rules.READS, incompatible=data_parallel_rules.incompatible),
    Rule(reads=fp8_rules.READS, incompatible=fp8_rules.incompatible),
    Rule(reads=kernels_rules.READS, incompatible=kernels_rules.incompatible),
    Rule(reads=offload_rules.READS, incompatible=offload_rules.incompatible),
    Rule(reads=parameters_rules.READS, incompatible=parameters_rules.incompatible),
    Rule(reads=pipeline_rules.READS, incompatible=pipeline_rules.incompatible),
)


def incompatible(config: TrainingConfig, global_batch: int | None = None) -> str | None:
    """The first reason why the knobs of a configuration do not go together; None if they do.

    It says nothing of the workload, the device or the number of ranks that run: each technique's `choices` and
    `apply` do.

    Args:
        config: The configuration; micro_batch x dp divides the global batch.
        global_batch: Samples per optimizer step. Without it the rules on the micro-batches of a step are left out.
    """
    for rule in RULES:
        reason = rule.incompatible(config, global_batch)
        if reason is not None:
            return reason
    return None


class Combinations:
    """All combinations of some knobs' values, and which of them go with the rest of a configuration.

    The answer is `incompatible`'s, for many configurations at once: each rule is asked once per combination of what
    it reads, and bases to which all rules answer the same share one list.

    Args:
        values: The values per knob.
        global_batch: Samples per optimizer step.
    """

    def __init__(self, values: Mapping[str, Sequence[Any]], global_batch: int) -> None:
        self._global_batch = global_batch
        self._rows = [dict(zip(values, row, strict=True)) for row in itertools.product(*values.values())]
        self._read = [[knob for knob in values if knob in rule.reads] for rule in RULES]
        self._parts = [
            [dict(zip(read, part, strict=True)) for part in itertools.product(*(values[knob] for knob in read))]
            for read in self._read
        ]
        self._legal: dict[tuple[tuple[int, ...], ...], list[dict[str, Any]]] = {}

    def legal_with(self, base: TrainingConfig) -> list[dict[str, Any]]:
        """The combinations that go with the other knobs of a configuration, in the order of the product."""
        refused = tuple(
            tuple(
                index
                for index, part in enumerate(parts)
                if rule.incompatible(base.model_copy(update=part), self._global_batch) is not None
            )
            for rule, parts in zip(RULES, self._parts, strict=True)
        )
        if refused not in self._legal:
            self._legal[refused] = [row for row in self._rows if not self._is_refused(row, refused)]
        return self._legal[refused]

    def _is_refused(self, row: Mapping[str, Any], refused: Sequence[Sequence[int]]) -> bool:
        return any(
            {knob: row[knob] for knob in read} == parts[index]
            for read, parts, indices in zip(self._read, self._parts, refused, strict=True)
            for index in indices
        )
