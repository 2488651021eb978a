"""NodeLink: a worker's two connections to one optimizer node (service.py has what is said on them).

link = NodeLink(address, secret, session="1/0", worker=0, told=told, number=0)
link.ask({"ask": "fetch", "unit": 3, "version": 1}, into=[buffer])
link.tell({"tell": "done", "window": 7})
"""

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_holmes import errors
from lightning_holmes.errors import ConnectionLostError, HolmesError
from lightning_holmes.optim.node.channel import Address, Channel


class NodeLink:
    """Of worker ``worker`` of a session; all of its workers make one to each of their nodes.

    Args:
        timeout_s: for which an answer is waited at most.

    Raises:
        ConnectionLostError: the node cannot be reached.
        ConfigurationError: it cannot serve what is ``told``.
    """

    def __init__(
        self,
        address: Address,
        secret: str,
        *,
        session: str,
        worker: int,
        told: Mapping[str, Any],
        number: int,
        timeout_s: float | None,
    ) -> None:
        self.peer = f"optimizer node {number}"
        hello = {"session": session, "worker": worker}

        def connect(kind: str) -> Channel:
            return Channel.connect(address, secret, hello | {"kind": kind}, peer=self.peer)

        self._connect = connect
        self._pull = self._connect("pull")
        self._lock = threading.Lock()
        self.ask({"told": dict(told)})
        self._push = self._connect("push")
        self._pull.wait_at_most(timeout_s)

    def ask(self, message: Mapping[str, Any], *, into: Sequence[Tensor] | None = None) -> dict[str, Any]:
        """What the node answers, its tensors in ``into``. From any thread.

        Raises:
            ConnectionLostError: the node is gone, or another worker.
            HolmesError: what has failed on the node.
        """
        with self._lock:
            self._pull.send(message)
            answer = self._pull.receive(into=into)
        return _checked(answer)

    def start_save(self, message: Mapping[str, Any]) -> Callable[[], dict[str, Any]]:
        """Let the node write what ``message`` says, as it is now whatever comes after; what this gives waits until that is written.

        Raises:
            ConnectionLostError: the node is gone, or another worker; likewise when it is waited for.
        """
        channel = self._connect("save")
        channel.send(message)
        _checked(channel.receive())

        def wait() -> dict[str, Any]:
            try:
                return channel.receive()
            finally:
                channel.close()

        return wait

    def tell(self, message: Mapping[str, Any]) -> None:
        """Send what is not answered. From one thread."""
        self._push.send(message)

    def wait_at_most(self, seconds: float) -> None:
        """From now on answers that take longer are an error."""
        self._pull.wait_at_most(seconds)

    def close(self) -> None:
        """Let go; the node drops what it holds when all workers have."""
        self._pull.close()
        self._push.close()


def at_once(acts: Sequence[tuple[NodeLink, Callable[[], Any]]]) -> None:
    """Run them all, those of different links side by side, so that the network of every node is used; those of one in their order.

    Raises:
        HolmesError: what the first of them raises, at once: another one may wait for what a lost node does not let happen.
    """
    by_link: dict[int, list[Callable[[], Any]]] = {}
    for link, act in acts:
        by_link.setdefault(id(link), []).append(act)
    if len(by_link) < 2:
        for _, act in acts:
            act()
        return
    ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def run(own: Sequence[Callable[[], Any]]) -> None:
        try:
            for act in own:
                act()
            ended.put(None)
        except BaseException as failure:
            ended.put(failure)

    for own in by_link.values():
        threading.Thread(target=run, args=(own,), name="holmes-node-link", daemon=True).start()
    for _ in by_link:
        failure = ended.get()
        if failure is not None:
            raise failure


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    """What a node says, unless it has failed."""
    failure = answer.get("failure")
    if failure is None:
        return answer
    kind, text = failure
    if kind == "lost":
        raise ConnectionLostError(text)
    found = getattr(errors, kind, None)
    raise (found if isinstance(found, type) and issubclass(found, HolmesError) else HolmesError)(text)
