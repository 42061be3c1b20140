"""Messages between processes: real concurrency, and ranks that die or leave."""

from __future__ import annotations

import signal

import pytest

from tests import ranks
from tests.core.bodies import message_bodies


@pytest.mark.parametrize("protocol", ["ll", "simple", None])
def test_messages_round_a_ring(url, protocol):
    assert ranks.run(3, message_bodies.handed_on, url, protocol, timeout=150) == [[]] * 3


def test_one_block_takes_what_several_have_sent_one_after_another(url):
    assert ranks.run(2, message_bodies.of_many_queues, url, timeout=60) == [2, (0, True, True)]


def test_what_somebody_sent_before_leaving_still_arrives(url):
    result = ranks.run(3, message_bodies.left_early, url, timeout=60)
    assert result[0] == [(2, list(range(1, 8))), (1, list(range(7)))]


@pytest.mark.parametrize("source", [1, None])
@pytest.mark.parametrize("how, words", [("killed", "died"), ("left", "closed the communicator")])
def test_a_sender_that_is_gone_is_named_within_two_seconds(url, source, how, words):
    with ranks.start(2, message_bodies.waited_for, url, source, how) as running:
        waiting, gone = running.results()
    assert gone.code == (-signal.SIGKILL if how == "killed" else None)
    assert waiting.error == "PeerDied" and words in waiting.text and "tag 4" in waiting.text, waiting
    assert waiting.seconds < 2.0 + 0.3 + ranks.BUSY  # two seconds from its death, which is 0.3 s after the meeting
