"""NodeServer: the server of an optimizer node: it listens for workers, and has one Service for all workers that hold the same stages.

    python -m lightning_holmes.optim.node HOST:PORT NUMBER [NODES ON THIS HOST]      # with the job's secret in HOLMES_NODE_SECRET

The process connects to the job's rank 0 at HOST:PORT and sends the address at which it listens. It listens on the interface that reaches
rank 0 and, if rank 0 asks for it, on a fast card that it shares with workers of its own cluster, and on no other. It ends when rank 0
tells it to, or is gone. If the job has failed and will be started again, it waits for the next rank 0.
"""

import contextlib
import gc
import itertools
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lightning_holmes.cluster.hardware import probe_host
from lightning_holmes.comm.freed_memory import give_back_freed_memory
from lightning_holmes.errors import CheckpointDamagedError, ConfigurationError, ConnectionLostError, HolmesError
from lightning_holmes.optim.node.channel import Address, Channel
from lightning_holmes.optim.node.kept import Kept
from lightning_holmes.optim.node.node_options import NodeOptions
from lightning_holmes.optim.node.service import Service
from lightning_holmes.version import __version__

SECRET = "HOLMES_NODE_SECRET"
"""The environment variable that holds the job's secret."""
PORT = "HOLMES_NODE_PORT"
"""The environment variable that holds the port at which rank 0 waits for nodes on other hosts."""
DEFAULT_PORT = 29700
_RANK_0_S = 120.0  # seconds to wait for rank 0
_DRAIN_S = 60.0  # seconds that workers may stay connected after rank 0 has ended


def versions() -> dict[str, str]:
    """Return the versions that must be the same on workers and nodes."""
    return {"lightning_holmes": __version__, "torch": str(torch.__version__), "byte order": sys.byteorder}


class Listener:
    """Accepts connections on ``host`` from processes that know ``secret``, and passes each to ``serve`` in a thread of its own.

    Args:
        port: the port to listen at; 0: any free port.

    Raises:
        ConfigurationError: ``host`` is not an address of this host, or the port is taken.
    """

    def __init__(
        self, host: str, secret: str, peer: str, serve: Callable[[Channel, dict[str, Any]], None], *, port: int = 0
    ) -> None:
        self._secret, self._peer, self._serve = secret, peer, serve
        try:
            self._socket = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        except OSError as error:
            raise ConfigurationError(f"nobody can listen for {peer} at {host}:{port}: {error}; set {PORT}") from error
        self.address: Address = self._socket.getsockname()[:2]
        threading.Thread(target=self._accept, name="holmes-node-listener", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._greet, args=(connection,), name="holmes-node-lane", daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        try:
            channel, hello = Channel.accept(connection, self._secret, peer=self._peer)
        except (ConnectionLostError, KeyError, ValueError, TypeError):  # not a connection of this job
            connection.close()
            return
        self._serve(channel, hello)

    def close(self) -> None:
        """Stop accepting connections."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._socket.close()


class NodeServer:
    """The services of optimizer node ``number``, for workers that connect to ``host``.

    Args:
        may_import: whether to import the module of an optimizer's class if it is not imported yet.
        expected: the description of the module for which this node was started; see Service.

    Attributes:
        kept: by the place of the workers, the units that the node still holds after these workers are gone.
    """

    def __init__(
        self,
        host: str,
        secret: str,
        *,
        number: int,
        may_import: bool,
        options: NodeOptions,
        expected: Mapping[str, Any] | None = None,
    ) -> None:
        self._number, self._may_import, self._options, self._expected = number, may_import, options, expected
        self.kept: dict[str, Kept] = {}
        self._services: dict[str, Service] = {}
        self._lock = threading.Condition()
        self._secret = secret
        self._listeners: list[Listener] = []
        self.address = self.listen(host)

    def listen(self, host: str) -> Address:
        """Listen at an address of this host too, at any port; returns the address with the port."""
        self._listeners.append(Listener(host, self._secret, "a worker", self._serve))
        return self._listeners[-1].address

    def _serve(self, channel: Channel, hello: dict[str, Any]) -> None:
        try:
            if hello["kind"] == "kept":
                for held in self.kept.values():
                    held.give(channel)
                channel.send({})
                channel.close()
                return
            session, worker = hello["session"], hello["worker"]
            if hello["kind"] == "pull":
                try:
                    service = self._open(session, channel.receive()["told"])
                except Exception as error:
                    said = str(error) if isinstance(error, HolmesError) else f"{type(error).__name__}: {error}"
                    channel.send({"failure": (type(error).__name__, f"optimizer node {self._number}: {said}")})
                    channel.close()
                    return
                channel.send({})
            else:
                service = self._services[session]
        except (ConnectionLostError, KeyError):
            channel.close()
            return
        service.serve(channel, hello["kind"], worker)
        with self._lock:
            if service.is_over and session in self._services:
                kept = service.leave()
                if kept is not None:
                    self.kept[service.told["place"]] = kept
                del self._services[session]
                self._lock.notify_all()
                with contextlib.suppress(OSError):  # the disk of its log may be full
                    print(service.summary(), flush=True)

    def drain(self) -> None:
        """Accept no new connections, and wait (at most _DRAIN_S seconds) until no worker is connected: rank 0 may end first."""
        for listener in self._listeners:
            listener.close()
        with self._lock:
            self._lock.wait_for(lambda: not self._services, _DRAIN_S)

    def _open(self, session: str, told: dict[str, Any]) -> Service:
        with self._lock:
            service = self._services.get(session)
            if service is None:
                name = f"optimizer node {self._number}, {told['place']}"
                self._services[session] = service = Service(
                    told,
                    name=name,
                    may_import=self._may_import,
                    options=self._options,
                    expected=self._expected,
                    kept=self._kept_for(told),
                )
                self.kept.pop(told["place"], None)
                print(service.describe(), flush=True)
        if service.told != told:
            different = next((key for key in told if service.told.get(key) != told[key]), "?")
            raise ConfigurationError(
                f"workers of {service.name} do not agree on {different}: start all with the same script, versions and options"
            )
        return service

    def _kept_for(self, told: Mapping[str, Any]) -> Kept | None:
        """Return the kept units from which these workers continue. If they start with new values, drop everything kept.

        Raises:
            CheckpointDamagedError: the workers continue from kept values, but there are none for them.
        """
        if not told["adopt"]:
            self.let_go()
            return None
        kept = self.kept.get(told["place"])
        if kept is None:
            raise CheckpointDamagedError(
                f"nothing is kept for {told['place']}, whose workers go on from what this node kept: was the node started anew? The job's next "
                f"start takes what was saved before"
            )
        return kept

    def let_go(self) -> None:
        """Drop everything that is kept."""
        while self.kept:
            self.kept.popitem()[1].close()
        _collect()


def join(
    addresses: Sequence[Address],
    number: int,
    *,
    may_import: bool,
    options: NodeOptions,
    wait_s: float = 0.0,
    again_s: float | None = None,
    expected: Mapping[str, Any] | None = None,
) -> int:
    """Run an optimizer node for the job whose rank 0 listens at one of ``addresses``, and for the same job when it is started again.

    Args:
        number: the number of this node; with -1 rank 0 assigns one.
        may_import: whether to import the module of an optimizer's class if it is not imported yet.
        options: the options with which this node was started.
        wait_s: seconds to wait for rank 0, which may be started later; also if torchrun is to start the workers again.
        again_s: seconds to wait for a new rank 0 after a failed run that is not known to be started again; None: never wait for a second
            run.
        expected: the description of the module for which this node was started; see Service.

    Returns:
        The exit code of the run.

    Raises:
        ConnectionLostError: rank 0 cannot be reached within ``wait_s``.
    """
    secret = os.environ[SECRET]
    control, welcome = _connect(addresses, secret, number, wait_s)
    kept: dict[str, Kept] = {}
    while True:
        number = welcome["number"]  # keep the number for a restart: it identifies the units that this node holds
        server = NodeServer(
            control.local_host,
            secret,
            number=number,
            may_import=may_import,
            options=options,
            expected=expected,
        )
        server.kept = kept
        where = {
            "kept": [held.commit for held in kept.values()],
            "address": server.address,
            "host": os.environ.get("HOLMES_HOST_NAME") or socket.gethostname(),
            "cluster": os.environ.get("HOLMES_CLUSTER"),
            "ports": _fast_ports(),
        }
        end = {"code": 1, "again": welcome["again"], "why": "its rank 0 is gone"}
        try:
            control.send(where | {"versions": versions()})
            while "listen" in (said := control.receive()):
                control.send({"addresses": {host: server.listen(host) for host in said["listen"]}})
            end = said["end"]
        except ConnectionLostError:
            pass
        server.drain()
        control.close()
        kept = server.kept
        code, patience = int(end["code"]), wait_s if end["again"] else again_s if end["code"] else 0.0
        if end["why"]:
            print(f"optimizer node {welcome['number']}: the job has ended: {end['why']}", flush=True)
        if again_s is None or not patience:
            server.let_go()
            return code
        del server
        _collect()
        print(f"optimizer node {number}: waiting {patience:.0f} s at most for the job to be started again", flush=True)
        try:
            control, welcome = _connect(addresses, secret, number, patience)
        except ConnectionLostError:
            for held in kept.values():
                held.close()
            print(f"optimizer node {number}: the job has not been started again within {patience:.0f} s", flush=True)
            return code


def _connect(addresses: Sequence[Address], secret: str, number: int, wait_s: float) -> tuple[Channel, dict[str, Any]]:
    """Connect to rank 0, at whichever address it listens; returns the connection and the first message of rank 0."""
    end = time.monotonic() + wait_s
    for address in itertools.cycle(addresses):
        try:
            control = Channel.connect(address, secret, {"kind": "node", "number": number}, peer="the job's rank 0")
            return control, control.receive()
        except ConnectionLostError:
            if time.monotonic() > end:
                raise
            time.sleep(1.0 / len(addresses))
    raise AssertionError("there is no address")


def _collect() -> None:
    """Free a closed service's memory, before the next one measures what is left: its threads and units form reference cycles."""
    gc.collect()
    give_back_freed_memory()


def _fast_ports() -> list[tuple[str, str]]:
    """Return the kind, and the address with prefix length, of each RDMA port of this host that sockets can use."""
    return [(port.kind, address) for port in probe_host().rdma if port.up for address in port.addresses]


def main(arguments: list[str]) -> int:
    """Run the command line that the module docstring describes; returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the workers; the node ends with them
    where, number, *others = arguments
    host, _, port = where.rpartition(":")
    return join(
        [(host, int(port))],
        int(number),
        may_import=True,
        options=NodeOptions.given(None, None, *map(int, others)),
        wait_s=_RANK_0_S,
    )
