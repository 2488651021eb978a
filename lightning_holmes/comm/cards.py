"""CardWatch: whether the fast cards that this rank's groups use are up, by what the kernel says of their interfaces.

A transfer over a card that went down stands still, and says nothing before its timeout; the kernel knows at once. Ethernet cards are not
watched: a cut of the network between hosts may end, and there is nothing to change to.

    cards = CardWatch(builder.fast_cards())
    cards.lost()                    # asked once a second; None, or what is to be told
    cards.leave(cards.down())       # no group uses them any more
    cards.returned()                # likewise of one of those
"""

import time
from collections.abc import Iterable, Mapping
from pathlib import Path

_INTERFACES = Path("/sys/class/net")
_FLAP_S = 5.0  # a card that is back sooner delays the transfers, and changes nothing
_BACK_S = 10.0  # a card that is up for so long is used again


class CardWatch:
    """Watches cards that are up now.

    Args:
        cards: what is to be told of each, by its interface.
        interfaces: the kernel's folder.
    """

    def __init__(self, cards: Mapping[str, str], interfaces: Path = _INTERFACES) -> None:
        self._folder = interfaces
        self._cards = {name: told for name, told in cards.items() if self._state(name) == "up"}
        self._since: dict[str, float] = {}  # a card is otherwise than it was found to be
        self._away: set[str] = set()

    def lost(self) -> str | None:
        """What is to be told of the first card that has been down for some seconds; None: all are up."""
        return self._changed([name for name in self._cards if name not in self._away], _FLAP_S, "is not up")

    def returned(self) -> str | None:
        """Likewise of a card that was down and has been up again for some seconds."""
        return self._changed(sorted(self._away), _BACK_S, "is up")

    def down(self) -> list[str]:
        """The interfaces that are down now."""
        return [name for name in self._cards if self._state(name) != "up"]

    def leave(self, down: Iterable[str]) -> None:
        """No group uses these interfaces from now on, and all others may be used."""
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
