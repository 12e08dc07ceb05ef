"""Is a plan still right on this machine?

measure.py   runs the parity check and one trial: `verify`
verdict.py   what the two say: holds, faster, slower and why, does not fit, does not run, trains otherwise
"""
