"""The records of a diagnosis: what a process of the script is asked (`Request`) and answers (`Answer`), and what comes
out (`Diagnosis`)."""

from __future__ import annotations

from typing import Literal

from autoplan.planner.records.trials import Interval
from autoplan.record import Record

Part = Literal[
    "data",
    "loop",
    "copy",
    "forward",
    "loss",
    "backward",
    "communication",
    "optimizer",
    "saving",
    "logging",
    "evaluation",
    "no_grad",
    "gc",
]

PARTS: dict[Part, str] = {
    "data": "waiting for the DataLoader",
    "loop": "the loop's own code",
    "copy": "copies to the device",
    "forward": "forward",
    "loss": "between forward and backward",
    "backward": "backward",
    "communication": "exchanges with other ranks",
    "optimizer": "optimizer",
    "saving": "saving",
    "logging": "logging",
    "evaluation": "evaluation",
    "no_grad": "forwards without gradients, seldom",
    "gc": "garbage collection",
}
"""The parts of a step and their words. `loop` is what no hook knows outside forward and loss."""


class PartTime(Record):
    """One part of the steps that were looked at.

    `seconds`, `low` and `high` are the mean, the 10th and the 90th percentile over the steps; `events` are the steps
    that have it, `every` the steps from one of them to the next; `line` is the line of the user's code where most of it
    was spent, as `train.py:12`.
    """

    part: Part
    seconds: float
    low: float
    high: float
    share: float
    events: int
    every: int = 1
    line: str | None = None


class SyncLine(Record):
    """A line that reads a tensor on the host: how often in a step, and for how long (seconds a step)."""

    line: str
    calls: float
    seconds: float


class Repeated(Record):
    """Lines of the user's code that each run many times in a step, in one part: loops over small operations.

    `line` is the one that most of the time is spent in, `calls` how often it runs, `share` that of all such lines.
    """

    part: Part
    line: str
    calls: int
    share: float


class Stack(Record):
    """Where the script was how often: a share of all looks at it, in one part.

    `frames` are the user's lines, the outermost first, as `train.py:12 in fit`, and a library's function at the end.
    """

    part: Part
    frames: tuple[str, ...]
    share: float


class Rates(Record):
    """What the device reaches in the script's process: FLOP/s of a large product by dtype (of `tf32` too, where the
    script has not set it), bytes/s of a copy beyond the caches, the host's seconds for one small operation."""

    flops_per_s: dict[str, float]
    bytes_per_s: float | None
    launch_s: float


Bound = Literal["compute", "memory", "launch"]


class Operations(Record):
    """Operations of one kind: seconds and calls of a step, their share of it, what they reach, and what bounds them.

    `of_rate` is the share of the rate that bounds them. None: not known from the shapes of their inputs.
    """

    kind: str
    seconds: float
    share: float
    calls: float = 0.0
    flops_per_s: float | None = None
    bytes_per_s: float | None = None
    bound: Bound | None = None
    of_rate: float | None = None


class LoaderFacts(Record):
    """The loader that a step waits for. `make_s` and `collate_s` are seconds of a step in this process."""

    workers: int
    persistent: bool
    iterable: bool
    start_s: float
    """Seconds of a step until the first batch of an epoch is there."""
    epoch_steps: float | None
    remade: bool = False
    """Whether the script makes the loader anew for each epoch."""
    make_s: float | None = None
    collate_s: float | None = None
    make_line: str | None = None


class Kept(Record):
    """A name of the user's that keeps tensors from step to step, the line that adds to it, and whether with graphs.

    `is_sum`: it is a tensor whose graph grows. A mean of the losses that a list keeps is one too.
    """

    name: str
    line: str | None
    graphs: bool
    is_sum: bool


class MemoryFacts(Record):
    """Memory over the steps, in bytes: of the host, or of what tensors hold on a CUDA device."""

    peak_bytes: int
    peak_part: Part
    peak_line: str | None
    training_bytes: int
    """The most in forward, backward and the optimizer."""
    growth_bytes: float
    """What a step adds."""
    kept: tuple[Kept, ...] = ()


class HandAttention(Record):
    """Attention in single operations, by a trace: what works on tensors of the size of the scores.

    `scores` is the largest shape of them, `seconds` what all of it takes of a step. `fused_s` is what torch's
    scaled_dot_product_attention takes for as many of these sizes, forward and backward, in the same process.
    """

    scores: tuple[int, ...]
    seconds: float
    fused_s: float
    line: str | None


class Exchange(Record):
    """What the ranks of a script exchange in a step."""

    ddp: bool
    """Whether DistributedDataParallel averages gradients."""
    gradient_bytes: int
    """Of the gradients that it averages."""
    calls: float
    """Calls of all_reduce, reduce, broadcast and barrier in a step."""

    @property
    def can_go(self) -> bool:
        """Whether the exchange can be left out."""
        return self.ddp or self.calls > 0


class RankBlock(Record):
    """A block of steps in which the ranks exchanged nothing, so that each had its own speed; tuples are by rank.

    `seconds` is the mean of a step; `lockstep_s` what steps would take that wait for their slowest rank each time;
    `inputs` the elements of the tensors that a model got in a step; `largest_inputs` how many times the mean of the
    ranks the largest of each step is; `parts` the seconds of a step by part.
    """

    seconds: tuple[float, ...]
    inputs: tuple[float, ...]
    lockstep_s: float
    largest_inputs: float
    parts: tuple[dict[str, float], ...]


class Facts(Record):
    """What else the first steps showed of the script and its process."""

    device: str
    threads: int
    cores: int
    optimizer: str | None
    """Of torch; None: the script steps by hand, and a step is a backward."""
    can_fuse: bool
    can_foreach: bool = False
    """Whether it steps one parameter after another, and could go over lists of them."""
    loader: LoaderFacts | None = None
    padding: float = 0.0
    """Share of the positions of a batch that are padding for all its samples."""
    needless: tuple[str, ...] = ()
    """Modules whose gradients nobody uses."""
    anomaly: bool = False
    """Whether the anomaly detection of autograd is on."""
    profiled: float = 0.0
    """Share of the steps in which torch.profiler recorded."""
    syncs: tuple[SyncLine, ...] = ()
    repeated: tuple[Repeated, ...] = ()
    """Loops of Python over small operations, by part."""
    compile_s: float = 0.0
    """Seconds of a step in which torch.compile compiled again."""
    recompiled: tuple[str, ...] = ()
    """What torch.compile compiled again: the line of the function, and the guard that failed; the most frequent first.
    """
    graph_breaks: tuple[str, ...] = ()
    bf16_gain: float | None = None
    """How much faster a large matrix product is in bf16 than in fp32; None: the script has bf16 or fp16 already, or the
    processor no instructions for it."""
    tf32_gain: float | None = None
    """The same of TF32; None, too, where the device has none, or the script uses it."""
    compiled: bool = False
    """Whether torch.compile has compiled anything."""
    rates: Rates | None = None
    throttled: float = 0.0
    """Share of the time in which the limit on CPU time of the cgroup stopped this process."""
    float64: bool = False
    """Whether the optimizer has parameters in fp64."""
    recomputed: float = 0.0
    """Calls of torch.utils.checkpoint in a step."""
    attention: HandAttention | None = None
    backward_again_s: float = 0.0
    """Seconds of a step in which backward goes over a graph that a backward went over before; `backward_line`: where.
    """
    backward_line: str | None = None
    unused_rows: tuple[str, ...] = ()
    """Embeddings of which a batch uses few rows; `unused_share` is that of all trained numbers in their other rows."""
    unused_share: float = 0.0
    exchange: Exchange | None = None
    """What it exchanges with other ranks; None where it is alone."""


def exactly(value: float) -> Interval:
    """A value without a spread."""
    return Interval(median=value, low=value, high=value, samples=1)


class Observation(Record):
    """The steps that were looked at: as the script is."""

    steps: int
    step_s: Interval
    mean_s: float
    parts: tuple[PartTime, ...]
    block_s: tuple[float, ...] = ()
    """The mean of a step in consecutive blocks of the steps that were looked at."""
    facts: Facts
    memory: MemoryFacts | None = None
    stacks: tuple[Stack, ...] = ()
    """The most frequent first."""
    operations: tuple[Operations, ...] = ()
    """By kind, from a trace of a few steps; what is between them last."""

    def part(self, part: Part) -> PartTime | None:
        """One part of the steps."""
        return next((one for one in self.parts if one.part == part), None)

    def share(self, part: Part) -> float:
        """Of the time, in a part."""
        own = self.part(part)
        return own.share if own else 0.0


class Suspect(Record):
    """A cause to remove: the switch that removes it, with its setting."""

    switch: str
    setting: int = 0
    part: Part
    worth: float
    """The share of the time that is expected to go."""
    cycle: int = 1
    """Steps after which the cause comes again: a block has whole cycles."""
    settle: int = 1
    """Steps after the cause is removed that do not count; `settle_back`: after it is put back."""
    settle_back: int = 1

    @property
    def key(self) -> str:
        """The name of what is measured: `workers=4`, `saving`."""
        return f"{self.switch}={self.setting}" if self.setting else self.switch


class SwitchTrial(Record):
    """A cause that was removed: pairs of (seconds of a step as it is, and without the cause), block beside block."""

    suspect: Suspect
    pairs: tuple[tuple[float, float], ...] = ()
    grew: tuple[tuple[float, float], ...] = ()
    """Bytes that a step added, as it is and without the cause; only where the cause is memory."""
    by_rank: tuple[RankBlock, ...] = ()
    """The blocks without an exchange; only where the cause is what ranks exchange."""
    why_not: str | None = None
    """Why there are no, or not enough, pairs."""


class Request(Record):
    """What the process of a script is asked."""

    script: str | None
    """The file, or the name of a module; None: the function that comes with the request."""
    is_module: bool = False
    arguments: tuple[str, ...] = ()
    budget_s: float
    sandbox: str
    without: tuple[str, ...] = ()
    """Keys of what is not to be removed: the script failed with it."""
    trials: tuple[SwitchTrial, ...] = ()
    """What an earlier process measured; its pairs count."""
    observation: Observation | None = None
    trace: str | None = None
    one_rank: bool = False
    """Give it the variables of torchrun, as the only rank."""
    nproc: int = 1
    """Ranks of the script, each in a process of its own."""
    ranks: tuple[Observation, ...] = ()
    """What each rank of an earlier process showed."""
    dynamic: bool = False
    """Have torch.compile take all shapes at once, and only look."""


class Answer(Record):
    """How far the process of a script came."""

    how: Literal["done", "running", "ended", "raised"] = "running"
    steps: int = 0
    observation: Observation | None = None
    trials: tuple[SwitchTrial, ...] = ()
    active: str | None = None
    """The key of what was removed when the script ended."""
    error: str | None = None
    line: str | None = None
    offline: bool = False
    """The script failed since the Hugging Face Hub is offline."""
    refused: tuple[str, ...] = ()
    """What the script wanted to write and could not."""
    notes: tuple[str, ...] = ()
    """What else the process did otherwise than the script says."""
    restricted: bool = False
    """Whether the kernel refuses writes outside of the sandbox."""
    raised_at: float | None = None
    """When the script failed (seconds of the clock that all processes share)."""
    rank: int | None = None
    """The rank that failed first, or ended before the others; None for a script of one rank."""
    ranks: tuple[Observation, ...] = ()
    """What each rank showed, where there are several."""


class Finding(Record):
    """One cause, what shows it, how to mend it and what that gives.

    `gain` is how many times faster a step is without the cause, with its 95 % interval where `measured`; an estimate
    is from the cause's own time, and its interval is its median.
    """

    cause: str
    what: str
    evidence: str
    mend: str
    gain: Interval
    measured: bool
    line: str | None = None
    stack: Stack | None = None
    """Where Python is the cause: the most frequent of its stacks."""


class RankTime(Record):
    """One rank: the seconds of its step when nobody waits for another, and the part where most of them are.

    `seconds` is None where the exchange could not be left out; `part` is the largest part of its steps as they are.
    """

    rank: int
    seconds: float | None
    step_s: float
    part: Part
    line: str | None


class Diagnosis(Record):
    """What makes a script slow, the costliest first; at most five findings, none for a healthy script."""

    script: str
    steps: int
    step_s: Interval
    parts: tuple[PartTime, ...]
    findings: tuple[Finding, ...]
    tested: tuple[SwitchTrial, ...]
    notes: tuple[str, ...]
    seconds: float
    stacks: tuple[Stack, ...] = ()
    """Where Python was, by line; the most frequent first."""
    operations: tuple[Operations, ...] = ()
    """By kind, that of most time first, and what is between them."""
    rates: Rates | None = None
    ranks: tuple[RankTime, ...] = ()
    """Where the script was run in several ranks."""

    @property
    def healthy(self) -> bool:
        """Whether nothing was found."""
        return not self.findings
