"""Ends in one of the ways in which a script makes no step."""

import sys

if sys.argv[1] == "input":
    input("which model? ")
elif sys.argv[1] == "raises":
    raise ValueError("the third of the secrets is 42")
elif sys.argv[1] == "status":
    sys.exit("the data is not here")
elif sys.argv[1] == "memory":
    held = []
    while True:
        held.append(bytearray(b"x" * (64 << 20)))
elif sys.argv[1] in ("one", "late"):
    import torch

    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(1 if sys.argv[1] == "one" else 10):
        model(torch.randn(4, 4)).sum().backward()
        optimizer.step()
    if sys.argv[1] == "late":
        input("go on? ")
elif sys.argv[1] == "loops":
    while True:
        try:
            while True:
                pass
        except BaseException:
            pass
elif sys.argv[1] == "hub":
    from huggingface_hub import hf_hub_download

    hf_hub_download("nobody/no-such-model", "config.json", cache_dir=sys.argv[2])
