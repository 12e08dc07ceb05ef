"""The parts of a model: repeated blocks, embeddings, head, tied weights, and what they allow.

structure.py       blocks, embeddings, head, tied weights of any nn.Module
tensor_plans.py    which projections are split over tensor-parallel ranks
pipeline_trace.py  what runs before, inside and after the blocks, for a pipeline cut
additivity.py      whether the loss of a batch is the sum of its samples' losses
facts.py           records of what the analysis found
"""
