"""Runs on a testbed's hosts: sends bytes from one host to another and prints the received bytes per second.

python -I -S transfer.py receive
python -I -S transfer.py send ADDRESS NUM_BYTES
"""

import socket
import sys
import time

PORT = 5000
CHUNK = 1 << 16
WAIT_S = 10.0


def receive() -> None:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("", PORT))
        listener.listen()
        listener.settimeout(WAIT_S)
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(WAIT_S)
            received, started = 0, time.monotonic()
            while data := connection.recv(1 << 20):
                received += len(data)
            print(received / (time.monotonic() - started))


def send(address: str, num_bytes: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            connection = socket.create_connection((address, PORT), timeout=1)
            break
        except OSError:  # the receiver does not listen yet, or there is no route
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
    with connection:
        connection.settimeout(WAIT_S)
        for start in range(0, num_bytes, CHUNK):
            connection.sendall(bytes(min(CHUNK, num_bytes - start)))


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive()
    else:
        send(sys.argv[2], int(sys.argv[3]))
