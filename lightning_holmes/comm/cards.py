"""CardWatch: watches whether the fast cards that this rank's groups use are up, by the kernel's state of their interfaces.

A transfer over a card that went down hangs, and fails only at its timeout; the kernel knows at once. Ethernet cards are
not watched: a cut network between hosts may come back, and there is no other card to move to.

    cards = CardWatch(builder.fast_cards())
    cards.lost()                    # called once a second; None, or the message about a card that is down
    cards.leave(cards.down())       # no group uses these cards any more
    cards.returned()                # None, or the message about one of these that is up again
"""

import time
from collections.abc import Iterable, Mapping
from pathlib import Path

_INTERFACES = Path("/sys/class/net")
_FLAP_S = 5.0  # a card that is back sooner only delays the transfers
_BACK_S = 10.0  # a card that is up for this long is used again


class CardWatch:
    """Watches the cards that are up when it is made.

    Args:
        cards: by the interface of each card, the message for when it goes down.
        interfaces: the kernel's folder of interfaces.
    """

    def __init__(self, cards: Mapping[str, str], interfaces: Path = _INTERFACES) -> None:
        self._folder = interfaces
        self._cards = {name: told for name, told in cards.items() if self._state(name) == "up"}
        self._since: dict[str, float] = {}  # by interface: when its state was first seen to have changed
        self._away: set[str] = set()

    def lost(self) -> str | None:
        """Return the message for the first card that has been down for _FLAP_S seconds; None if there is none."""
        return self._changed([name for name in self._cards if name not in self._away], _FLAP_S, "is not up")

    def returned(self) -> str | None:
        """Return the message for a card that was down and has been up again for _BACK_S seconds; None if there is none."""
        return self._changed(sorted(self._away), _BACK_S, "is up")

    def down(self) -> list[str]:
        """The interfaces that are down now."""
        return [name for name in self._cards if self._state(name) != "up"]

    def leave(self, down: Iterable[str]) -> None:
        """Note that from now on no group uses the interfaces ``down``, and that groups may use all others."""
        self._since.clear()
        self._away = set(down)

    def _changed(self, names: list[str], patience_s: float, what: str) -> str | None:
        now = time.monotonic()
        for name in names:
            state = self._state(name)
            if (state == "up") != (what == "is up"):
                self._since.pop(name, None)
            elif now - self._since.setdefault(name, now) >= patience_s:
                told = self._cards[name] if what != "is up" else f"the card {name} is up again"
                return f"{told} ({self._folder / name / 'operstate'} says {state!r})"
        return None

    def _state(self, name: str) -> str:
        try:
            return (self._folder / name / "operstate").read_text().strip()
        except OSError:
            return "gone"
