"""GPT-2's written-out GELU as torch's operation: the same values and gradients, fewer tensors kept."""

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN, NewGELUActivation

from autoplan.errors import ConfigError
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.prepare import prepare
from tests.strategies.tiny import BERT, GPT2, language


def saved_bytes(function, x):
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.nbytes) or t, lambda t: t):
        function(x)
    return sum(kept)


@pytest.mark.parametrize("name", ["gelu_new", "gelu_fast"])
def test_it_is_the_same_formula(name):
    x = torch.linspace(-6, 6, 1001, dtype=torch.float64, requires_grad=True)
    written, torchs = ACT2FN[name], nn.GELU(approximate="tanh")
    torch.testing.assert_close(torchs(x), written(x), rtol=1e-9, atol=1e-9)
    one, other = (torch.autograd.grad(f(x).sum(), x)[0] for f in (written, torchs))
    torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-9)
    assert saved_bytes(torchs, x) * 3 <= saved_bytes(written, x)


def test_every_formula_of_the_model_is_replaced():
    losses = {}
    for value, kind in (("own", NewGELUActivation), ("torch", nn.GELU)):
        run = prepare(language(GPT2), TrainingConfig.model_validate({"micro_batch": 2, "gelu": value}))
        assert [type(block.mlp.act) for block in run.model.transformer.h] == [kind] * 3
        losses[value] = float(run.step(run.workload.make_batch(4, 0)).loss)
    assert losses["torch"] == pytest.approx(losses["own"], rel=1e-6)


def test_a_model_without_it_is_refused():
    with pytest.raises(ConfigError, match="no GELU whose tanh formula"):
        prepare(language(BERT), TrainingConfig(micro_batch=2, gelu="torch"))
