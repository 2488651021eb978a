"""Links: makes the connections of this process go on soon after a cut link between hosts is back.

It has its own thread, since any other thread may be waiting for an answer from another host.

    links = Links({"10.0.0.2"}, kept_s=600.0)
    links.stop()
"""

import threading
from collections.abc import Collection

from lightning_holmes.comm.sockets import send_again_soon

_FIRST_S = 1.0
_PAUSE_S = 5.0  # connections that are made later are found in a later round


class Links:
    """``peers``: addresses of other hosts. ``kept_s``: how long a cut must be survived, in seconds."""

    def __init__(self, peers: Collection[str], kept_s: float) -> None:
        self._peers, self._kept_s = peers, kept_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, name="holmes-links", daemon=True)
        self._thread.start()

    def _look(self) -> None:
        pause = _FIRST_S
        while not self._stop.wait(pause):
            send_again_soon(self._peers, self._kept_s)
            pause = _PAUSE_S

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()
