"""Two hosts with an optimizer node's connections between them: one connection is idle, the other one always sends.
Each end prints when it has lost which connection."""

import os
import socket
import threading
import time

import torch

from lightning_holmes.errors import ConnectionLostError
from lightning_holmes.optim.node.channel import Channel

KINDS = ("quiet", "busy")


def connect(address: tuple[str, int], kind: str) -> Channel:
    while True:
        try:
            return Channel.connect(address, "secret", {"kind": kind}, peer="the listener")
        except ConnectionLostError:  # the listener is not ready yet
            time.sleep(0.1)


def watch(channel: Channel, kind: str, *, sends: bool) -> None:
    block = {"values": torch.zeros(1 << 20)}
    try:
        while True:
            if sends:
                channel.send(block)
            else:
                channel.receive()
    except ConnectionLostError:
        print(f"lost {kind} {time.monotonic()}\n", end="", flush=True)  # in one write: the other thread prints, too


def main() -> None:
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    channels = {}
    if os.environ["NODE_RANK"] == "0":
        with socket.create_server(address) as server:
            while len(channels) < len(KINDS):
                channel, hello = Channel.accept(server.accept()[0], "secret", peer="the other")
                channels[hello["kind"]] = channel
    else:
        channels = {kind: connect(address, kind) for kind in KINDS}
    sends = os.environ["NODE_RANK"] == "1"
    threads = [
        threading.Thread(target=watch, args=(channel, kind), kwargs={"sends": sends and kind == "busy"})
        for kind, channel in channels.items()
    ]
    for thread in threads:
        thread.start()
    print("connected", flush=True)
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
