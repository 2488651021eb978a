"""Stand-in for the Python interpreter on any host of a testbed: the test's nursery (launch.py) forks the process.

    python -I -S forked.py SOCKET SCRIPT ARGUMENT...      # as python SCRIPT ARGUMENT...
    python -I -S forked.py SOCKET -m MODULE ARGUMENT...   # as python -m MODULE ARGUMENT...

The forked process gets the arguments, environment, folder, output, namespaces and cgroup of this process. This
process forwards signals to the forked one and ends with its exit code or signal.
"""

import json
import os
import signal
import socket
import sys


def main(path: str, arguments: list[str]) -> None:
    order = {"argv": arguments, "env": dict(os.environ), "folder": os.getcwd(), "pid": os.getpid()}
    with socket.socket(socket.AF_UNIX) as nursery:
        nursery.connect(path)
        socket.send_fds(nursery, [json.dumps(order).encode() + b"\n"], [1, 2])
        with nursery.makefile() as answers:
            pid = int(answers.readline())
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, lambda number, _: os.kill(pid, number))
            code = int(answers.readline())
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
