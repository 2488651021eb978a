"""CardWatch: watches whether the fast cards that this rank's groups use are up, by the kernel's state of their interfaces.

A transfer over a card that went down hangs, and fails only at its timeout; the kernel knows at once. Ethernet cards are
not watched: a cut network between hosts may come back, and there is no other card to use.

    cards = CardWatch(builder.fast_cards())
    cards.lost()                    # called once a second; None, or the message about a card that is down
"""

import time
from collections.abc import Mapping
from pathlib import Path

_INTERFACES = Path("/sys/class/net")
_FLAP_S = 5.0  # a card that is back sooner only delays the transfers


class CardWatch:
    """Watches the cards that are up when it is made.

    Args:
        cards: by the interface of each card, the message for when it goes down.
        interfaces: the kernel's folder of interfaces.
    """

    def __init__(self, cards: Mapping[str, str], interfaces: Path = _INTERFACES) -> None:
        self._folder = interfaces
        self._cards = {name: message for name, message in cards.items() if self._state(name) == "up"}
        self._down_since: dict[str, float] = {}

    def lost(self) -> str | None:
        """Return the message for the first card that has been down for _FLAP_S seconds; None if there is none."""
        now = time.monotonic()
        for name, message in self._cards.items():
            state = self._state(name)
            if state == "up":
                self._down_since.pop(name, None)
            elif now - self._down_since.setdefault(name, now) >= _FLAP_S:
                return f"{message} ({self._folder / name / 'operstate'} says {state!r})"
        return None

    def _state(self, name: str) -> str:
        try:
            return (self._folder / name / "operstate").read_text().strip()
        except OSError:
            return "gone"
