"""Parity: does a configuration still train the same thing as one plain fp32 process?"""
