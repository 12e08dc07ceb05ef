from pathlib import Path
from typing import Any

import pytest

from autoplan.processes import Zygote
from autoplan.strategies.config import TrainingConfig
from tests.strategies.parallel.world import run_step


@pytest.fixture(scope="session")
def zygote(training_zygote: Zygote) -> Zygote:
    return training_zygote


@pytest.fixture(scope="session")
def plain(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One step of one plain process, per model, computed once."""
    kept: dict[str, Any] = {}

    def reference(model: str) -> Any:
        if model not in kept:
            folder: Path = tmp_path_factory.mktemp("plain")
            kept[model] = run_step(zygote, model, TrainingConfig(micro_batch=8), folder)
        return kept[model]

    return reference
