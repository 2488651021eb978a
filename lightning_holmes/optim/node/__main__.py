"""An optimizer node that a job has started by itself; see server.py."""

import os
import sys

from lightning_holmes.optim.node.server import main

if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # threads that serve workers are not waited for
