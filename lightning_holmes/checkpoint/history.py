"""History: the events of a job on this host, one line of JSON each, in a file beside its snapshots.

    history = History(folder / "history")
    history.note("start", "start 2, of 8 ranks")
    history.note("caught up", "step 912 is done again", lost_s=41.0)
    [event.line() for event in history.read()]

A killed process cannot record an event; other ranks record it. Events for which no space is left are dropped.
"""

import contextlib
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An event. ``kind``: start, resumed, told (a signal asked the job to end), slow (a rank), moved (groups, to other network cards), failed, or
    caught up; ``at``: its time in seconds since the epoch."""

    kind: str
    at: float
    words: str
    lost_s: float = 0.0

    def line(self) -> str:
        """Return the event as a line of text for people."""
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.at))
        return f"{when}  {self.words}{f': {self.lost_s:.0f} s lost' if self.lost_s else ''}"


class History:
    """The events of a job, oldest first."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def note(self, kind: str, words: str, *, lost_s: float = 0.0) -> None:
        """Add an event with the present time; only the first line of ``words`` is kept."""
        event = Event(kind=kind, at=time.time(), words=words.partition("\n")[0], lost_s=lost_s)
        with contextlib.suppress(OSError), self._path.open("a") as file:
            print(json.dumps(asdict(event)), file=file)

    def read(self) -> list[Event]:
        """Return all events, without lines that are incomplete."""
        found = []
        with contextlib.suppress(OSError):
            for line in self._path.read_text().splitlines():
                with contextlib.suppress(ValueError, TypeError):  # a line cut off because no space was left
                    found.append(Event(**json.loads(line)))
        return found


def summary(events: list[Event]) -> str:
    """A text with the number of starts of the job and the seconds lost."""
    starts = sum(event.kind == "start" for event in events)
    lost_s = sum(event.lost_s for event in events)
    started = f"{starts} start{'s' * (starts != 1)}, " if starts else ""  # without snapshots starts are not recorded
    return f"{started}{lost_s:.0f} s lost in faults"
