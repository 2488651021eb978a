"""Test a connection between two hosts: the second host sends while its own card is down, and prints how its socket is
set.

python link_worker.py             # on both, by Testbed.run, which sets MASTER_ADDR and NODE_RANK
"""

import os
import socket
import time

from lightning_holmes.comm.sockets import send_again_soon

LONGEST_PAUSE = (socket.IPPROTO_TCP, 44)
PORT = 29_555


def serve(address: str) -> None:
    """Send back each byte that is received."""
    with socket.create_server((address, PORT)) as listener:
        connection, _ = listener.accept()
        with connection:
            while data := connection.recv(1):
                connection.sendall(data)


def connected(address: str) -> socket.socket:
    """Connect as soon as the other host listens."""
    end = time.monotonic() + 30
    while True:
        try:
            return socket.create_connection((address, PORT), timeout=5)
        except OSError:
            assert time.monotonic() < end
            time.sleep(0.1)


def ask(address: str) -> None:
    """Send requests until an answer is late and a request could not be sent; then look after the connection until the
    answers arrive."""
    told, waiting = "", 0
    with connected(address) as connection:
        connection.settimeout(0.3)
        while told != "answered":
            hastened = send_again_soon({address}, 60.0)
            if not told:
                print(f"hastened {hastened}", flush=True)
                if not hastened:  # before Linux 6.15
                    return
                told = "ready"
                print(told, flush=True)
            pause_ms = connection.getsockopt(*LONGEST_PAUSE)
            if told == "late" and pause_ms > 5_000:
                told = "waits"  # for fifteen retries, up to two minutes apart
                print(told, flush=True)
            elif told in ("ready", "late"):  # the late request may have been sent and its answer lost
                connection.sendall(b"a")
                waiting += 1
            try:
                assert connection.recv(1) == b"a"
                waiting -= 1
            except TimeoutError:
                told = "late" if told == "ready" else told
                continue
            if told in ("late", "waits"):
                told = "answered"
            time.sleep(0.02)
        connection.settimeout(30)
        while waiting:
            waiting -= len(connection.recv(waiting))
        send_again_soon({address}, 60.0)
        print(f"answered, pause {connection.getsockopt(*LONGEST_PAUSE)}", flush=True)


if __name__ == "__main__":
    (serve if os.environ["NODE_RANK"] == "0" else ask)(os.environ["MASTER_ADDR"])
