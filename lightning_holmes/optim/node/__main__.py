"""Runs an optimizer node that the job itself has started; see server.py."""

import os
import sys

from lightning_holmes.optim.node.server import main

if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # do not wait for threads that serve workers
