"""plan.prepare of a plan with products in fp8."""

import json

import pytest
import torch

from autoplan.errors import ConfigError
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.techniques.fp8 import emulated_fp8
from autoplan.strategies.workloads.sources import make_spec
from tests.recorded import make_plan
from tests.strategies.tiny import LLAMA

pytestmark = pytest.mark.filterwarnings("ignore:the plan was found on other hardware")


@pytest.mark.torchao
def test_products_in_fp8(tmp_path):
    """Emulated; on a CPU as it is, the plan is refused with the reason."""
    path = tmp_path / "llama.json"
    path.write_text(json.dumps(LLAMA))
    spec = make_spec(model=str(path), sequence_length=32, global_batch=4)
    config = TrainingConfig(micro_batch=2, precision="bf16", fp8="tensorwise")
    plan = make_plan(config, workload=spec, accumulation=2)
    with pytest.raises(ConfigError, match="compute capability 8.9"):
        plan.prepare()
    with emulated_fp8():
        run = plan.prepare()
        names = list(run.state_dict()["model"])
        assert torch.isfinite(run.step(run.workload.make_batch(run.local_batch, 0)).loss)
    plain = make_plan(config.model_copy(update={"fp8": "off"}), workload=spec, accumulation=2).prepare()
    assert list(plain.state_dict()["model"]) == names
    plain.load_state_dict(run.state_dict())
