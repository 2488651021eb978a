"""NodeLink: a worker's two connections to one optimizer node (service.py describes their messages).

link = NodeLink(address, secret, session="1/0", worker=0, told=told, number=0, timeout_s=None)
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
    """The link of worker ``worker`` of a session to one node; every worker of the session must create one to each of their nodes.

    Args:
        told: the description of the optimizer and the units; see Service.
        number: the number of the node.
        timeout_s: seconds to wait for an answer at most; None: without limit.

    Raises:
        ConnectionLostError: the node cannot be reached.
        ConfigurationError: the node cannot serve ``told``.
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
        """Send a request and return the answer, with its tensors in ``into``. May be called from any thread.

        Raises:
            ConnectionLostError: the node is gone, or another worker.
            HolmesError: the failure of the node.
        """
        with self._lock:
            self._pull.send(message)
            answer = self._pull.receive(into=into)
        return _checked(answer)

    def start_save(self, message: Mapping[str, Any]) -> Callable[[], dict[str, Any]]:
        """Let the node write the values that ``message`` asks for, as they are now; later updates do not change what is written.

        Returns:
            A function that waits until the values are written, and returns the node's answer.

        Raises:
            ConnectionLostError: the node is gone, or another worker; the returned function may raise it, too.
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
        """Send a message that the node does not answer. Must be called from one thread only."""
        self._push.send(message)

    def wait_at_most(self, seconds: float) -> None:
        """Raise ConnectionLostError from now on if an answer takes longer than ``seconds``."""
        self._pull.wait_at_most(seconds)

    def close(self) -> None:
        """Close both connections. When all workers have, the node drops its units, unless it keeps them for a restart (kept.py)."""
        self._pull.close()
        self._push.close()


def at_once(acts: Sequence[tuple[NodeLink, Callable[[], Any]]]) -> None:
    """Run all functions, those of different links in parallel, so that the network of every node is used; those of one link in order.

    Raises:
        HolmesError: raised by the first function that fails. The others are not waited for, since they may wait for a lost node.
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
    """Return the answer of a node; raise the error that it contains, if the node has failed."""
    failure = answer.get("failure")
    if failure is None:
        return answer
    kind, text = failure
    if kind == "lost":
        raise ConnectionLostError(text)
    found = getattr(errors, kind, None)
    raise (found if isinstance(found, type) and issubclass(found, HolmesError) else HolmesError)(text)
