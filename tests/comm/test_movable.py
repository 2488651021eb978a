"""Groups that are reconnected while they are in use. Baseline: the same work without a move, bit for bit."""

import os
import socket

import pytest
from launch import launch

from lightning_holmes.comm.sockets import end_connections, listening, send_again_soon


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "payload", [{"seed": 1, "moves": 12}, {"seed": 2, "moves": 6, "cut": 2}], ids=["", "a card that nobody reaches"]
)
def test_what_was_under_way_when_groups_were_moved_is_repeated_bit_for_bit(payload: dict[str, int]) -> None:
    found = launch(3, "moved_groups:work", payload, timeout_s=240)
    assert all(rank["same"] for rank in found), found
    assert {rank["moves"] >= payload["moves"] for rank in found} == {True}, found
    assert all(rank["left"] == 0 for rank in found), found


def test_connections_are_ended_also_where_another_process_holds_them_and_no_others_are() -> None:
    before, listeners = listening(), [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    ends = [listener.getsockname() for listener in listeners]
    assert listening() - before == set(ends)
    pairs = []
    for listener in listeners:
        ours = socket.create_connection(listener.getsockname())
        pairs.append((ours, listener.accept()[0]))
    held = os.dup(pairs[0][0].fileno())
    end_connections({ends[0]}, {ends[1]})
    for connection in (*pairs[0], *pairs[1]):
        assert connection.recv(1) == b""
    pairs[2][0].send(b"x")
    assert pairs[2][1].recv(1) == b"x"
    os.close(held)
    for connection in (*listeners, *sum(pairs, ())):
        connection.close()


def test_connections_with_other_hosts_send_again_every_five_seconds_and_are_kept_for_as_long_as_before() -> None:
    """docs/log.md says what a cut of a minute costs with this. The numbers are those of linux/tcp.h."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as ours:
        theirs = listener.accept()[0]
        with theirs:
            try:
                usual = ours.getsockopt(socket.IPPROTO_TCP, 44)
            except OSError:  # Linux before 6.15
                assert send_again_soon({"127.0.0.1"}, 0.0) == 0
                pytest.skip("Linux before 6.15")
            assert send_again_soon({"192.0.2.1"}, 0.0) == 0
            for each in (ours, theirs):  # as on an optimizer node's connection, whose silence must be noticed
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 20_000)
            send_again_soon({"127.0.0.1"}, 2000.0)
            for each in (ours, theirs):
                assert each.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 20_000
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)
            assert ours.getsockopt(socket.IPPROTO_TCP, 44) == usual > 5000
            assert send_again_soon({"127.0.0.1"}, 2000.0) >= 2
            for each in (ours, theirs):
                assert each.getsockopt(socket.IPPROTO_TCP, 44) == 5000
                assert each.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 2_000_000
            assert send_again_soon({"127.0.0.1"}, 2000.0) == 0
