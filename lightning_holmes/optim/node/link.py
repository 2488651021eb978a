"""NodeLink: a worker's two connections to one optimizer node (service.py has what is said on them).

link = NodeLink(address, secret, session="1/0", worker=0, told=told, number=0)
link.ask({"ask": "fetch", "unit": 3, "version": 1}, into=[buffer])
link.tell({"tell": "done", "window": 7})
"""

import threading
from collections.abc import Mapping, Sequence
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
        self._pull = Channel.connect(address, secret, hello | {"kind": "pull"}, peer=self.peer)
        self._lock = threading.Lock()
        self.ask({"told": dict(told)})
        self._push = Channel.connect(address, secret, hello | {"kind": "push"}, peer=self.peer)
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
        failure = answer.get("failure")
        if failure is None:
            return answer
        kind, text = failure
        if kind == "lost":
            raise ConnectionLostError(text)
        found = getattr(errors, kind, None)
        raise (found if isinstance(found, type) and issubclass(found, HolmesError) else HolmesError)(text)

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
