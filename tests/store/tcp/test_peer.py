"""One connection between two ranks."""

import socket

from tricomm.store.tcp.matching import Matching, Transfer
from tricomm.store.tcp.peer import EAGER_BYTES, STAGING_BYTES, Peer


def test_messages_that_end_with_their_connection_fail_and_those_that_came_before_are_read():
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    one, other = (
        Peer(rank, end, Matching(), memoryview(bytearray(STAGING_BYTES))) for rank, end in enumerate((ours, theirs))
    )
    long = memoryview(bytearray(EAGER_BYTES + 1))
    sends = [Transfer(0, tag, (long,)) for tag in (1, 2)]
    for send in sends:
        one.send(send, eager=False)
    receives = [Transfer(1, tag, (memoryview(bytearray(len(long))),)) for tag in (1, 2)]
    for receive in receives:
        other._matching.receive(receive, (1,))
        other.expect(receive)
    other.read()  # clears both
    last = Transfer(1, 3, (memoryview(b"last"),))
    other.send(last, eager=True)
    got = Transfer(0, 3, (memoryview(bytearray(4)),))
    one._matching.receive(got, (0,))
    one.expect(got)
    theirs.close()
    one.read()
    assert [send.done and send.error is not None for send in sends] == [True, True]
    assert got.done and got.error is None and bytes(got.parts[0]) == b"last"
    one.read()
    ours.close()
