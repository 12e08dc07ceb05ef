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
elif sys.argv[1] == "loops":
    while True:
        try:
            while True:
                pass
        except BaseException:
            pass
