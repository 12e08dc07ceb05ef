"""The lossy knobs: parameters and optimizer states that are kept in fewer bits, products in 8 bits. Loads no torch.

They lose something at each step that a short parity check cannot show, so a search has them only on request
(`--numerics lossy`), and a plan names the risk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from autoplan.strategies.knob import Knob, Need

Parameters = Annotated[
    Literal["own", "bf16", "bf16_stochastic"],
    Knob(
        technique="parameters",
        numerics="changes",
        lossy=("bf16", "bf16_stochastic"),
        needs=(Need(knob="precision", values=("bf16",)),),
        left_out="no `--numerics lossy`; no parameter in fp32; tensor parallelism, a pipeline; a long accumulation",
        without="parameters and gradients stay as your model has them, which takes more memory than measured",
    ),
    Field(
        description="own: as the model has them; bf16: stored in bf16, with bf16 gradients, and stepped on fp32 master "
        "copies in the optimizer; bf16_stochastic: no copies, each step is rounded up or down by chance",
    ),
]

OptimizerState = Annotated[
    Literal["own", "bf16", "8bit"],
    Knob(
        technique="optimizer_state",
        numerics="changes",
        memory_only="rounds no moments",
        lossy=("bf16", "8bit"),
        left_out="no `--numerics lossy`; another optimizer than torch's Adam and AdamW; amsgrad; `8bit`: no torchao",
        without="the moments stay in the dtype of the parameters, which takes more memory than measured",
    ),
    Field(
        description="how Adam's two moments are kept between steps: own: as the optimizer makes them; bf16: in bf16, "
        "rounded up or down by chance; 8bit: in torchao's 8 bits with a scale for each 256",
    ),
]

Fp8 = Annotated[
    Literal["off", "tensorwise", "rowwise"],
    Knob(
        technique="fp8",
        numerics="changes",
        device="cuda",
        lossy=("tensorwise", "rowwise"),
        must_gain=True,
        needs=(Need(knob="precision", values=("bf16",)),),
        left_out="no `--numerics lossy`; compute capability below 8.9 (`rowwise`: 9.0); no torchao; no linear layer "
        "that is large enough; no gain is predicted; tensor parallelism, a pipeline",
        without="the products of linear layers stay in bf16, which takes longer than measured",
    ),
    Field(
        description="products of large linear layers in 8-bit floating point (torchao): off; tensorwise: one scale "
        "for each tensor; rowwise: one for each row or column, in powers of two",
    ),
]

RISKS: Mapping[tuple[str, str], str] = {
    ("parameters", "bf16"): "parameters=bf16: the forward and the gradients see parameters of 8 bits of mantissa, and "
    "gradients of micro-batches are added up in bf16; the fp32 master copies keep every update. Three steps cannot "
    "show what this does to the loss of a long training",
    ("parameters", "bf16_stochastic"): "parameters=bf16_stochastic: there is no fp32 copy. An update that is smaller "
    "than the last bit of a parameter (0.4 to 0.8 % of it) arrives by chance: right on average, as noise in each "
    "step. Three steps cannot show what the noise does to a long training with a small learning rate",
    ("optimizer_state", "bf16"): "optimizer_state=bf16: Adam's moments keep 8 bits of mantissa, rounded by chance: the "
    "second moment changes by a thousandth a step, less than its last bit. It is right on average and noisy; three "
    "steps cannot show what that does to a long training",
    ("optimizer_state", "8bit"): "optimizer_state=8bit: Adam's moments keep 8 bits, with a scale for each 256: small "
    "ones beside a large one lose most of their bits, which three steps, with moments that have just begun, cannot "
    "show",
    ("fp8", "tensorwise"): "fp8=tensorwise: activations and weights keep 4 bits of mantissa in the products of linear "
    "layers, gradients of outputs 3, and a whole tensor has one scale: beside outliers, which grow over a long "
    "training, small numbers become zero. Three steps cannot show that",
    ("fp8", "rowwise"): "fp8=rowwise: activations, weights and gradients of outputs keep 4 bits of mantissa in the "
    "products of linear layers, with a scale for each row: outliers, which grow over a long training, hide small "
    "numbers of their row alone. Three steps cannot show what that does to the loss",
}
"""By knob and value, what a plan says of a lossy choice: what the parity check cannot show."""


TORCHAO_INSTALL = 'pip install "autoplan[cuda]" (or torchao)'

NEEDS_TORCHAO: Mapping[str, tuple[str, ...]] = {"optimizer_state": ("8bit",), "fp8": ("tensorwise", "rowwise")}
"""By knob, the values that torchao makes."""


def rounds_steps(config: Any) -> bool:
    """Whether the steps of a configuration round what they keep."""
    return bool(config.parameters != "own" or config.optimizer_state != "own")


def risks_of(values: Mapping[str, Any]) -> Iterator[str]:
    """The risks of the lossy choices among the values of knobs."""
    for (knob, value), text in RISKS.items():
        if values.get(knob) == value:
            yield text
