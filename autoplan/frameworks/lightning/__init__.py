"""Lightning, as `lightning` and as `pytorch_lightning`.

read.py        a LightningModule with its data as a Workload
apply.py       a plan to a LightningModule, and as the arguments of the Trainer that trains it
watch.py       LightningWatch, a callback

Nothing here imports Lightning, but for watch.py.
"""
