"""Traces: the real program under fake tensors, recorded as a profile that the cost model reads."""
