"""Runs an optimizer node that the job itself has started; see role.py."""

import os
import sys

from lightning_holmes.optim.node.role import main

if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # threads may still wait for workers
