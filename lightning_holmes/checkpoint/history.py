"""History: what has happened to a job on this host: a line of JSON each, beside its snapshots.

    history = History(folder / "history")
    history.note("start", "start 2, of 8 ranks")
    history.note("caught up", "step 912 is done again", lost_s=41.0)
    [event.line() for event in history.read()]

A process that is killed says nothing; its fellows do. What there is no room for is left out.
"""

import contextlib
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """``kind``: start, resumed, told (by a signal), slow (a rank), moved (groups, to other cards), failed, or caught up; ``at`` in seconds since the
    epoch."""

    kind: str
    at: float
    words: str
    lost_s: float = 0.0

    def line(self) -> str:
        """For people."""
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.at))
        return f"{when}  {self.words}{f': {self.lost_s:.0f} s lost' if self.lost_s else ''}"


class History:
    """The events of a job, oldest first."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def note(self, kind: str, words: str, *, lost_s: float = 0.0) -> None:
        """Add an event of now; of ``words`` the first line."""
        event = Event(kind=kind, at=time.time(), words=words.partition("\n")[0], lost_s=lost_s)
        with contextlib.suppress(OSError), self._path.open("a") as file:
            print(json.dumps(asdict(event)), file=file)

    def read(self) -> list[Event]:
        """All that was noted whole."""
        found = []
        with contextlib.suppress(OSError):
            for line in self._path.read_text().splitlines():
                with contextlib.suppress(ValueError, TypeError):  # there was no room for it
                    found.append(Event(**json.loads(line)))
        return found


def summary(events: list[Event]) -> str:
    """How often the job was started, and what that has cost."""
    starts = sum(event.kind == "start" for event in events)
    lost_s = sum(event.lost_s for event in events)
    started = f"{starts} start{'s' * (starts != 1)}, " if starts else ""  # without snapshots they are not known
    return f"{started}{lost_s:.0f} s lost in faults"
