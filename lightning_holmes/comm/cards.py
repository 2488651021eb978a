"""CardWatch: whether the fast cards that this rank's groups use are up, by what the kernel says of their interfaces.

A transfer over a card that went down stands still, and says nothing before its timeout; the kernel knows at once. Ethernet cards are not
watched: a cut of the network between hosts may end, and there is nothing to change to.

    cards = CardWatch(builder.fast_cards())
    cards.lost()                    # asked once a second; None, or what is to be told
"""

import time
from collections.abc import Mapping
from pathlib import Path

_INTERFACES = Path("/sys/class/net")
_FLAP_S = 5.0  # a card that is back sooner delays the transfers, and changes nothing


class CardWatch:
    """Watches cards that are up now.

    Args:
        cards: what is to be told of each, by its interface.
        interfaces: the kernel's folder.
    """

    def __init__(self, cards: Mapping[str, str], interfaces: Path = _INTERFACES) -> None:
        self._folder = interfaces
        self._cards = {name: told for name, told in cards.items() if self._state(name) == "up"}
        self._down_since: dict[str, float] = {}

    def lost(self) -> str | None:
        """What is to be told of the first card that has been down for some seconds; None: all are up."""
        now = time.monotonic()
        for name, told in self._cards.items():
            state = self._state(name)
            if state == "up":
                self._down_since.pop(name, None)
            elif now - self._down_since.setdefault(name, now) >= _FLAP_S:
                return f"{told} ({self._folder / name / 'operstate'} says {state!r})"
        return None

    def _state(self, name: str) -> str:
        try:
            return (self._folder / name / "operstate").read_text().strip()
        except OSError:
            return "gone"
