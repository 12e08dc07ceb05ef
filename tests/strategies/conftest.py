import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def graphs_alone(monkeypatch):
    """Modules are compiled to their graphs, forward and backward, and no code is generated for these.

    That takes a tenth of the time, and what a test says of graphs needs no more. The parity contract
    (tests/contracts) trains with the code generator.
    """
    compile_whole = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *args, **given: compile_whole(*args, backend="aot_eager", **given))
