"""The metadata of a knob: which technique applies it, what it goes with, whether a search varies it by itself.

Each field of `TrainingConfig` carries one `Knob`, and `autoplan.strategies.config.knobs` reads them. The lists of knobs
in autoplan are made from them. Loads no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["run", "rank_count", "layout", "exchange"]
"""run: any run has it, whatever its ranks. rank_count: ranks along one axis of the device mesh. layout: how the ranks
of one combination of degrees split the model and the steps. exchange: how data-parallel ranks exchange parameters and
gradients."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """Another knob that a knob needs: a number of at least so much, or one of some values.

    Attributes:
        knob: The other knob.
        at_least: The smallest number that will do.
        values: The values that will do, the one that suits every value of the knob last.
        why: Why the knob is refused without it; "": it then has no effect.
    """

    knob: str
    at_least: int = 0
    values: tuple[str, ...] = ()
    why: str = ""

    def is_met(self, value: Any) -> bool:
        """Whether a value of the other knob will do."""
        return value in self.values if self.values else value >= self.at_least

    @property
    def example(self) -> Any:
        """A value of the other knob that will do for every value of the knob."""
        return self.values[-1] if self.values else self.at_least

    def describe(self) -> str:
        """`dp_shard >= 2` or `compile=block or model`."""
        return f"{self.knob}={' or '.join(self.values)}" if self.values else f"{self.knob} >= {self.at_least}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Knob:
    """Facts about a knob besides its values and its description, which its field holds.

    Attributes:
        technique: The file of strategies/techniques/ that applies it.
        numerics: What its other values change: nothing; rounding (the same sums in another order, about 1e-6 relative
            in fp32); or the numerics (the plan says so and passes the parity check at that precision).
        role: Whether it belongs to a combination of degrees, and how.
        device: The one device type on which it has more than its plain value.
        needs: What it goes with: without it, it has no effect or is refused (`Need.why`).
        excludes: By other knob, why that one keeps its plain value beside this one.
        unpriced: Why the cost model does not read it: a search then varies it only if the user names its values.
        memory_only: For a knob whose other values only save memory: what its plain value saves, in words. A search
            tries the other values only if the plain one may not fit.
        memory_only_on: The one device type on which that is so; None: all.
        risks: By value that loses bits at each step (parameters, optimizer states, products in fewer bits), what a
            plan says of it: what the few steps of a parity check cannot show. A search has these values only with
            `--numerics lossy`.
        made_by_torchao: The values that torchao makes.
        must_gain: A search tries its other values only where they are predicted to be faster than the plain one.
        last_resort: A search offers its other values only if no configuration with the plain one is sure to fit.
        offered: The values that a search offers, in words, where the knob has no closed list.
        left_out: When a search leaves values out, in words, besides what `device`, `needs` and `excludes` say.
        without: What happens in a tool that does not carry its value, in words after "with the tool".
    """

    technique: str
    numerics: Literal["none", "rounding", "changes"] = "rounding"
    role: Role = "run"
    device: Literal["cpu", "cuda"] | None = None
    needs: tuple[Need, ...] = ()
    excludes: Mapping[str, str] = field(default_factory=dict)
    unpriced: str = ""
    memory_only: str = ""
    memory_only_on: Literal["cpu", "cuda"] | None = None
    risks: Mapping[str, str] = field(default_factory=dict)
    made_by_torchao: tuple[str, ...] = ()
    must_gain: bool = False
    last_resort: bool = False
    offered: str = ""
    left_out: str = ""
    without: str = ""
