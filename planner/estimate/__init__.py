"""Estimates of a workload on a cluster that is not here: traced on this machine, priced by datasheets."""
