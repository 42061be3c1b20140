"""How the ranks that are left of a group make a smaller one: through its control pages and sockets, without a Store.

    each rank that is left writes its proposal into its page, and waits until all have done so
    the lowest of them, the leader, invites them: their calls by number, and the new group's nonce
    they pass new control segments over sockets, whose names are in their pages, and set up the group over these
    each rank is READY; the leader votes for the group once all are, a READY rank that gives up votes against it

The calls that meet are one attempt. If it fails, each rank shows the error with the attempt's number, so that a call
hears no error of an earlier attempt. The first vote counts (`ballot`): all have the new group, or all raise, even if a
rank is killed or stopped between any two steps. `devtools/mailbox_model` visits every order of these steps (`shrink`),
and of repeated calls (`shrink_calls`). No memory of the old group is used again, so late stores of an excluded rank
cannot reach the new one.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, NoReturn

from tricomm.deadline import Deadline, poll
from tricomm.errors import CollectiveTimeout, GroupAborted, InvalidArgument, PeerDied, ResourceError, TricommError
from tricomm.store.ballot import Ballot
from tricomm.store.control import ControlPage, Fault, RankSegment, RankState, error_kind, packed_error
from tricomm.store.descriptors import DescriptorSocket, Sender, Unreachable
from tricomm.store.page import NBYTES, Page
from tricomm.store.proposal import PHASES, Phase, Proposal
from tricomm.store.records import NONCE_BYTES
from tricomm.store.segments import Segment

MOST_RANKS = 64
_PAUSES = 5e-5, 2e-3


class Shrink:
    """One rank's call of shrink: `agree`, `connect`, `decide`, in this order, and `give_up` if a step raises; `close`
    in any case. `control` is the old group's page, `exclude` and `again` as in `Proposal`; replace connects otherwise.

    `members` are the old numbers of the new group's ranks, in order, once they have agreed.
    """

    def __init__(
        self, control: ControlPage, exclude: frozenset[int] | None, deadline: Deadline, again: bool = False
    ) -> None:
        self.deadline = deadline
        self.members: tuple[int, ...] = ()
        self._control, self._rank, self._exclude = control, control.rank, exclude
        self._socket = DescriptorSocket()
        self._segments: list[Segment] = []
        self._ballot = Ballot()
        self._decided = False
        _, before = self._read(self._rank)
        before = before or Proposal(0, 0, None)
        number, attempt = before.number + 1, before.attempt + 1
        self._mine = Proposal(number, attempt, exclude, before.failed, error=before.error, again=again)
        self._names: list[bytes] = []
        self._late: list[int] = []

    @property
    def origin(self) -> str:
        """The old group and the ranks that are left out of it, in words."""
        out = [rank for rank in range(self._control.world_size) if rank not in self.members]
        return f"group {self._control.group} {f'without rank(s) {out}' if out else 'again'}"

    @property
    def nonce(self) -> bytes:
        """The secret that the members share, once they have agreed."""
        return self._mine.nonce

    def agree(self) -> None:
        """Wait until all ranks that are left ask for the same. Raises the same error on all of them if one gives up:
        `InvalidArgument` if they leave out different ranks, `PeerDied` if one has ended, `CollectiveTimeout` that names
        those that did not come; and `GroupAborted` if the others have gone on without this rank."""
        live = [theirs.attempt for _, phase, theirs in self._records() if phase not in (Phase.WITHDRAWN, Phase.DECIDED)]
        self._join(*live)  # what failed before these is over
        if len(self._control.peers):
            self._socket.bind()
        self._post(Phase.PROPOSED, socket=self._socket.name)
        if not poll(self._agreed, self.deadline.left, *_PAUSES):
            what = "replace" if self._mine.again else "shrink"
            raise self._timeout(
                f"rank(s) {self._late} did not call {what}, although their processes run{self._failures()}"
            )

    def connect(self) -> ControlPage:
        """Pass new control segments among the members, over sockets. Raises as `DescriptorSocket.exchange`, and the
        same error as a member that has given up."""
        control, members = self._control, self.members
        rank, size, nonce = members.index(self._rank), len(members), self._mine.nonce
        own = Segment.create("tricomm-control", NBYTES, shared=False)
        self._segments.append(own)
        me = control.member(self._rank)
        page = Page(own.buffer, own.address)
        page.identify(rank, size, nonce, me.pid, me.start_time)
        page.state = RankState.CONNECTING
        made: dict[int, RankSegment] = {rank: replace(me, segment=own)}

        def take(theirs: int, held: list[int]) -> None:
            member = control.member(members[theirs])
            segment = Segment.attach(held, NBYTES, readonly=True)
            self._segments.append(segment)
            Page(segment.buffer, segment.address).check(theirs, size, nonce, member.pid, member.start_time)
            made[theirs] = replace(member, segment=segment)

        try:
            sender = Sender(rank, size, nonce, "shrink")
            self._socket.exchange(sender, self._names, [own.fd], take, self.deadline, self.look_at_members)
            own.close_fd()
            new = ControlPage(rank, nonce, [made[r] for r in range(size)])
            new.limit = self.deadline
            new.beat()
            new.set_state(RankState.READY)
            self._segments.clear()
            return new
        except BaseException as error:  # members that hold this page wait for this rank on it
            named = self._named(error)
            page.put_fault(Fault(type(named).__name__, rank, 0, str(named)))
            page.state = RankState.CLOSED
            if isinstance(error, Unreachable):
                raise named from error
            raise

    def decide(self) -> None:
        """The last step, once this rank has all that it needs: returns on all members or raises on all."""
        self._pass_ballot()
        self._post(Phase.READY)
        try:
            if not poll(self._lead if self._leads else self._follow, self.deadline.left, *_PAUSES):
                raise self._timeout(f"rank(s) {self._late} did not finish the set-up")
        except TricommError as error:
            if not self.give_up(error):
                raise
        self._control.own().step = self._step(Phase.DECIDED)

    def give_up(self, error: BaseException) -> bool:
        """Tell the others that this call has failed. True if that is too late, because the group is decided.
        Idempotent."""
        own, ready = self._control.own(), self._control.own().step >= self._step(Phase.READY)
        if self._decided or own.step in (self._step(Phase.DECIDED), self._step(Phase.WITHDRAWN)):
            return own.step != self._step(Phase.WITHDRAWN)
        failed = 0 if self._mine.hopeless(self._all_gone()) else self._mine.attempt
        self._join(*(theirs.failed for _, _, theirs in self._records()))  # the next call hears none of these
        self._post(Phase.WITHDRAWN, failed=failed, error=packed_error(self._named(error)))
        self._decided = ready and self._ballot.vote(False)
        if self._decided:
            own.step = self._step(Phase.READY)
        return self._decided

    def close(self) -> None:
        """Release what `connect` has not handed over. Idempotent."""
        self._socket.abandon()
        self._ballot.close()
        while self._segments:
            self._segments.pop().close()

    # The ranks agree

    def _join(self, *attempts: int) -> None:
        """Let this call belong to the latest of these attempts and its own one."""
        self._mine = replace(self._mine, attempt=max((self._mine.attempt, *attempts)))

    def _agreed(self) -> bool:
        control, rank = self._control, self._rank
        out = self._all_gone() if self._exclude is None else self._exclude  # before the pages are read
        said: dict[int, tuple[Phase, Proposal]] = {}
        for peer, phase, theirs in self._records():
            if phase == Phase.DECIDED:
                kept = [other for other, number in enumerate(theirs.invited) if number and other != rank]
                how = "made the group again" if theirs.again else "gone on as a smaller group"
                raise GroupAborted(f"rank(s) {kept} have {how}, without this rank")
            said[peer] = phase, theirs
        self._socket.peers = [theirs.socket for _, theirs in said.values()]  # `close` removes those of killed ranks
        gone = self._all_gone()  # again: a peer whose page names other ranks may know of another end
        if self._mine.hopeless(gone):
            raise PeerDied("; ".join(self._ended(peer) for peer in sorted(gone - set(out))))
        if self._exclude is None and gone != out:  # and a peer's call may have failed because of it
            return False
        left = [peer for peer in range(control.world_size) if peer not in out]
        standing: dict[int, tuple[Phase, Proposal]] = {}
        for peer, (phase, theirs) in said.items():
            self._hear(peer, theirs, out)
            if phase == Phase.WITHDRAWN or theirs.attempt < self._mine.attempt or theirs.hopeless(gone - {peer}):
                continue  # its next call may succeed
            self._refuse(peer, theirs)
            if peer not in out:
                standing[peer] = phase, theirs
        self._late = [peer for peer in left if peer != rank and peer not in standing]
        attempt = self._mine.attempt
        self._join(*(theirs.attempt for _, theirs in standing.values()))
        if attempt < self._mine.attempt:
            self._post(Phase.PROPOSED)
            return False
        if self._late:
            return False
        sockets = {rank: self._mine.socket} | {peer: theirs.socket for peer, (_, theirs) in standing.items()}
        if left[0] == rank:
            numbers = {rank: self._mine.number} | {peer: theirs.number for peer, (_, theirs) in standing.items()}
            invited = tuple(numbers.get(peer, 0) for peer in range(control.world_size))
            self._accept(invited, secrets.token_bytes(NONCE_BYTES), sockets)
            self._post(Phase.INVITED)
            return True
        phase, leader = standing[left[0]]
        invited = leader.invited
        if phase < Phase.INVITED or not invited or invited[rank] != self._mine.number:
            return False
        if {peer for peer, number in enumerate(invited) if number} != set(left):  # the leader has not seen an end yet
            return False
        self._accept(invited, leader.nonce, sockets)
        return True

    def _failures(self) -> str:
        """How the latest calls of the ranks that have not come have failed, in words."""
        late = [(peer, theirs.error) for peer, _, theirs in self._records() if peer in self._late and theirs.error]
        return "".join(f"; rank {peer}'s last call failed: {_text(error)}" for peer, error in late)

    def _accept(self, invited: tuple[int, ...], nonce: bytes, sockets: dict[int, bytes]) -> None:
        self.members = tuple(peer for peer, number in enumerate(invited) if number)
        self._mine = replace(self._mine, invited=invited, nonce=nonce)
        self._names = [sockets[peer] for peer in self.members]

    def _hear(self, peer: int, theirs: Proposal, out: Iterable[int]) -> None:
        """Raise the error of `peer` if it has failed this call's attempt. A rank that is left out fails it only if it
        refuses the call."""
        failed = theirs.failed >= self._mine.attempt
        if failed and (peer not in out or error_kind(theirs.error) is InvalidArgument):
            self._raise_as(peer, theirs)

    def _refuse(self, peer: int, theirs: Proposal) -> None:
        """Raise if `peer` asks for something else."""
        if not self._gone(peer) and self._differ(theirs):
            self._join(theirs.attempt)
            raise InvalidArgument(
                f"rank {self._rank} {self._mine.asks()}, rank {peer} {theirs.asks()}: ask for the same on all of them"
            )

    def _differ(self, theirs: Proposal) -> bool:
        mine = self._mine
        if None in (mine.exclude, theirs.exclude) and mine.again is theirs.again:
            # The one that names ranks may name only those that have ended.
            named = (mine.exclude or frozenset()) | (theirs.exclude or frozenset())
            return any(not self._gone(rank) for rank in named)
        return (mine.exclude, mine.again) != (theirs.exclude, theirs.again)

    # The members set up the group

    def look_at_members(self) -> None:
        """Raise if a member has given up, or has ended without being ready."""
        for peer in self.members:
            if peer == self._rank:
                continue
            ended = self._gone(peer)  # before its page is read
            number, phase = divmod(self._control.page(peer).step, PHASES)
            if number != self._mine.invited[peer] or phase == Phase.WITHDRAWN:
                _, theirs = self._read(peer)
                if theirs is None:
                    continue  # it is being written
                self._raise_as(peer, theirs)
            if ended and phase < Phase.READY:
                raise PeerDied(self._ended(peer))

    def _ready(self) -> bool:
        self._late = [peer for peer in self.members if divmod(self._control.page(peer).step, PHASES)[1] < Phase.READY]
        return not self._late

    def _pass_ballot(self) -> None:
        """Let all members have the leader's ballot. Raises as `connect`."""
        self._ballot.make()

        def take(theirs: int, held: list[int]) -> None:
            if theirs == 0:
                self._ballot.take(held)

        sender = Sender(self.members.index(self._rank), len(self.members), self._mine.nonce, "shrink: ballot")
        own = [self._ballot.fd]
        try:
            self._socket.exchange(sender, self._names, own, take, self.deadline, self.look_at_members)
        except Unreachable as error:
            raise self._named(error) from error
        self._socket.close()

    def _lead(self) -> bool:
        self.look_at_members()
        return self._ready() and self._ballot.vote(True)

    def _follow(self) -> bool:
        leader = self.members[0]
        ended = self._gone(leader)  # before its vote is read
        if self._ballot.passed:
            return True
        if ended:
            raise PeerDied(self._ended(leader))
        self.look_at_members()
        self._late = [leader]
        return False

    @property
    def _leads(self) -> bool:
        return self.members[0] == self._rank

    # Pages

    def _named(self, error: BaseException) -> TricommError:
        """`error` as the other ranks see it."""
        if isinstance(error, TricommError) and not isinstance(error, Unreachable):
            return error
        kind = ResourceError if isinstance(error, Unreachable | OSError | MemoryError) else GroupAborted
        return kind(f"rank {self._rank} was stopped by {type(error).__name__}: {error}")

    def _step(self, phase: Phase) -> int:
        return self._mine.number * PHASES + phase

    def _post(self, phase: Phase, **changes: Any) -> None:
        """Write this rank's record, and then its word."""
        self._mine = replace(self._mine, **changes)
        own = self._control.own()
        own.put_shrink(self._mine.pack())
        own.step = self._step(phase)

    def _records(self) -> Iterator[tuple[int, Phase, Proposal]]:
        """The peers' phases and records, but those that are being written."""
        for peer in self._control.peers:
            phase, theirs = self._read(peer)
            if theirs is not None:
                yield peer, phase, theirs

    def _read(self, peer: int) -> tuple[Phase, Proposal | None]:
        """A rank's phase and its record; no record if it is being written."""
        page, world_size = self._control.page(peer), self._control.world_size
        number, phase = divmod(page.step, PHASES)
        data = page.shrink() if number else None
        theirs = Proposal.unpack(data, world_size) if data is not None else None
        return Phase(phase), theirs if theirs is not None and theirs.number == number else None

    def _all_gone(self) -> set[int]:
        return {peer for peer in self._control.peers if self._gone(peer)}

    def _gone(self, peer: int) -> bool:
        return self._control.page(peer).state == RankState.CLOSED or not self._control.alive(peer)

    def _ended(self, peer: int) -> str:
        closed = self._control.page(peer).state == RankState.CLOSED
        return f"rank {peer} {'closed the group' if closed else f'(pid {self._control.pid(peer)}) died'}"

    def _raise_as(self, peer: int, theirs: Proposal) -> NoReturn:
        self._join(theirs.failed)
        text = _text(theirs.error)
        raise error_kind(theirs.error)(text if text.startswith("rank ") else f"rank {peer}: {text}")

    def _timeout(self, text: str) -> CollectiveTimeout:
        return CollectiveTimeout(f"timeout after {self.deadline.waited:.1f} s: {text}")


def _text(error: bytes) -> str:
    return error[32:].decode(errors="ignore")
