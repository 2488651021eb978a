"""What a rank that ends shows of its exception, depending on which rank failed first."""

from contextlib import nullcontext
from typing import Any

import pytest

from lightning_holmes.comm.failure import Failure
from lightning_holmes.comm.uncaught import line_of
from lightning_holmes.errors import ConfigurationError, ConnectionLostError, RemoteError
from lightning_holmes.strategy.connection import Connection


@pytest.fixture(autouse=True)
def _excepthook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.excepthook", lambda *_: None)  # monkeypatch also restores what is set after this


class Watch:
    def __init__(self, first: Failure | None) -> None:
        self.first = first

    def report(self, exception: BaseException) -> Failure | None:
        return self.first


@pytest.mark.parametrize(
    ("exception", "first", "line"),
    [
        (ValueError("here"), Failure(2, "ValueError: here", told_by=2), None),
        (ValueError("here"), None, None),
        (ConfigurationError("no file"), Failure(2, "ConfigurationError: no file", told_by=2), None),
        (ValueError("a\nb"), Failure(0, "ValueError: a\nc", told_by=0), "ends, because rank 0 failed: ValueError: a"),
        (RemoteError("rank 0 ..."), Failure(0, "KeyError: 3", told_by=0), "ends, because rank 0 failed: KeyError: 3"),
        (
            KeyError("x"),
            Failure(0, "KeyError: 3", told_by=0),
            "ends, because rank 0 failed: KeyError: 3; here KeyError: 'x'",
        ),
        (
            ConfigurationError("no file"),
            Failure(0, "ConfigurationError: no file", told_by=0),
            "ends with the same ConfigurationError as rank 0",
        ),
        (ConnectionLostError("cut"), None, "ConnectionLostError: cut"),
    ],
)
def test_only_the_rank_that_fails_first_shows_a_traceback(
    exception: Exception, first: Failure | None, line: str | None
) -> None:
    connection: Any = Connection.__new__(Connection)
    connection.rank, connection.num_nodes, connection.watch = 2, 1, Watch(first)
    connection.backend = "gloo"
    connection.report(exception, nullcontext)
    assert connection.failed and connection.watch is None
    assert line_of(exception) == (None if line is None else f"[rank 2] {line}")


def test_each_host_has_the_words_since_it_may_have_a_log_of_its_own() -> None:
    exception, connection = ConfigurationError("no file"), Connection.__new__(Connection)
    connection.rank, connection.num_nodes, connection.backend = 2, 2, "gloo"
    connection.watch = Watch(Failure(0, "ConfigurationError: no file", told_by=0))  # type: ignore[assignment]
    connection.report(exception, nullcontext)
    assert line_of(exception) == "[rank 2] ends, because rank 0 failed: ConfigurationError: no file"
