import pytest

from autoplan.processes import Zygote


@pytest.fixture(scope="session")
def zygote(training_zygote: Zygote) -> Zygote:
    return training_zygote
