"""The choices of a strategy, recorded so that they repeat an execution."""

from __future__ import annotations


class Choices:
    """`made` are the switches, (step, task). At all other moments the task that ran last continues.

    A strategy is asked several times at one step if the task that it chose goes to sleep or ends before its next step.
    Then `made` also has the answers before a switch at that step, so that a replay does not switch at an earlier
    question.
    """

    def __init__(self) -> None:
        self.made: list[tuple[int, str]] = []
        self._since: list[tuple[int, str]] = []  # answers at the last step, since the last switch

    def note(self, step: int, task: str, switched: bool) -> None:
        self._since = [answer for answer in self._since if answer[0] == step] + [(step, task)]
        if switched:
            self.made += self._since
            self._since = []
