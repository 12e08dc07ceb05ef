"""The trace: records what one micro-step of the real program does, as a profile for the cost model.

In the order of the data:

- trace.py: the entry; from a WorkloadSpec to a ModelProfile, with a cache;
- build_profile.py: traces every variant and puts the profile together;
- variant_tracer.py: one variant, from recordings at two micro-batches, of models with few blocks;
- record_step.py: runs one micro-step under the recorder;
- op_recorder.py: records each operation and the bytes alive;
- linear_fit.py: from recordings to straight lines in the samples;
- op_benchmark.py: times the recorded operations on the device;
- input_benchmark.py: times the workload's make_batch;
- model_profile.py: what is asked of a trace, the records of the result, and the variants.
"""
