"""A rank of the model: its program, the rules by which it names and runs its calls, and the events that it allows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

_UNKNOWN = "?"  # stands for the attaching callback, if not all ranks of the group know it
WRONG, DEADLOCK, MISMATCH = "combines different calls", "deadlock", "a named error"


class Call(NamedTuple):
    """An asynchronous call. Calls of the same name on several ranks belong together. With a tag it is a message."""

    name: str
    group: str = "g"
    tag: int | None = None


class Wait(NamedTuple):
    future: str  # of a call (by its name), or of a Then or All


class Then(NamedTuple):
    """Attach the callback `body` to a future; `child` completes when it has returned."""

    future: str
    body: str
    child: str


class All(NamedTuple):
    """torch.futures.collect_all."""

    futures: tuple[str, ...]
    child: str


class Destroy(NamedTuple):
    group: str = "g"


Statement = Call | Wait | Then | All | Destroy
Program = Mapping[str, tuple[Statement, ...]]  # "main", and the callbacks by name
Groups = Mapping[str, tuple[int, ...]]  # the members, in the order of creation


class Rules(NamedTuple):
    """The rules are the defaults; any other value removes a rule."""

    numbers: Literal["identity", "arrival"] = "identity"
    counted: Literal["group", "callback"] = "group"  # how a callback's calls are counted: per group, or per callback
    late: Literal["callback", "attacher"] = "callback"  # to whom the calls of a late callback belong
    places: Literal["line", "all", "run"] = "line"  # counted per attaching line; over all lines; when the callback runs
    parents: Literal["name", "difference", "none"] = "name"  # how an identity names the group of the parent call
    chained: bool = True  # futures that `then` returned are tracked
    collected: bool = True  # futures of collect_all are tracked
    lines: Literal["callback", "call", "group"] = "callback"  # a line for each callback, or a coarser one
    begins: Literal["at once", "callbacks first", "gives up"] = "at once"  # when the next call of a line begins
    threads: Literal["callback", "call", "one"] = "callback"  # a thread for each callback, each call, or all
    match: Literal["identity", "records", "group"] = "identity"  # "group": by the group's tag; "records": and compared
    workers: int | None = None  # most calls that run at the same time
    leaves: Literal["at once", "after callbacks"] = "at once"  # destroy


class _Future(NamedTuple):
    line: str  # the line in which its call was made
    identity: str  # "": untracked
    chained: bool
    done: bool = False
    callbacks: tuple[_Frame, ...] = ()


class _Frame(NamedTuple):
    """A body that a thread runs or will run. `context` is the identity of the callback, "" for the program."""

    body: str
    at: int
    context: str | None  # None: the place is counted when it runs
    result: str
    future: str


class Queued(NamedTuple):
    group: str
    line: str  # its calls run one after another, by position
    position: int
    identity: str
    state: Literal["queued", "begun", "done"]
    slot: str  # calls of the same slot exchange messages


Frozen = tuple[tuple[tuple[str, Any], ...], ...]


class Rank:
    """One state of a rank. Threads are stacks of frames; the last one runs."""

    def __init__(self, rank: int, program: Program, groups: Groups, rules: Rules, state: Frozen | None = None) -> None:
        self._made, self._rules, self._program = (rank, program, groups, rules), rules, program
        mine = [group for group, members in groups.items() if rank in members]
        self._groups, self._created = groups, {group: number for number, group in enumerate(mine)}
        self._parts = {s.child: s.futures for body in program.values() for s in body if isinstance(s, All)}
        self._watched = {
            f
            for body in program.values()
            for s in body
            if not isinstance(s, Call | Wait | Destroy)
            for f in (s.futures if isinstance(s, All) else (s.future,))
        }
        main = (_Frame("main", 0, "", "", ""),)
        frozen: Frozen = state or ((("main", main),), (), (), (), ())
        self.threads: dict[str, tuple[_Frame, ...]] = dict(frozen[0])
        self.calls: dict[str, Queued] = dict(frozen[1])
        self._futures: dict[str, _Future] = dict(frozen[2])
        self._counts: dict[str, int] = dict(frozen[3])
        self._marks: dict[str, bool] = dict(frozen[4])  # destroyed groups, and calls whose callbacks were given up
        if state is None:
            self._settle()

    def frozen(self) -> Frozen:
        parts: list[dict[str, Any]] = [self.threads, self.calls, self._futures, self._counts, self._marks]
        return tuple(tuple(sorted(part.items())) for part in parts)

    @property
    def ended(self) -> bool:
        return not self.threads and all(call.state == "done" for call in self.calls.values())

    # Events

    def moves(self) -> Iterator[Frozen | str]:
        """For each event that needs no other rank: the state after it, or its fault."""
        for thread in self.threads:
            if self._can_step(thread):
                rank = self._copy()
                fault = rank._step(thread)
                rank._settle()
                yield fault or rank.frozen()
        for name in self.calls:
            if self._can_begin(name):
                rank = self._copy()
                rank._begin(name)
                rank._settle()
                yield rank.frozen()
            if self._rules.begins == "gives up" and name not in self._marks and self._calls_back(name):
                rank = self._copy()
                rank._marks[name] = True
                yield rank.frozen()

    def finishes(self) -> Iterator[tuple[str, Frozen]]:
        """The calls that have begun, and the state after each ends. A call can end once all members have begun it."""
        for name, call in self.calls.items():
            if call.state == "begun":
                rank = self._copy()
                rank.calls[name] = call._replace(state="done")
                rank._complete(name, None)
                rank._settle()
                yield name, rank.frozen()

    def _copy(self) -> Rank:
        return Rank(*self._made, self.frozen())

    def _settle(self) -> None:
        """Run the events that no other thread can observe: completed waits, and ends of callbacks without chained
        callbacks."""
        for thread in list(self.threads):
            while thread in self.threads and self._can_step(thread):
                frame = self.threads[thread][-1]
                ends = frame.at == len(self._program.get(frame.body, ()))
                if not (ends and frame.result not in self._watched or not ends and self._waits(frame)):
                    break
                self._step(thread)

    # Calls

    def _call(self, statement: Call, context: str) -> str | None:
        name, group, tag = statement
        rules = self._rules
        if group in self._marks:
            return MISMATCH
        if tag is not None:
            line = identity = f"{group} tag {tag} #{self._count(f'{group} tag {tag}')}"
        elif rules.numbers == "arrival" or rules.begins == "gives up" and self._given_up(context):
            line, identity = group, str(self._count(group))
        else:
            line = f"{group} {self._run_line(context)}".rstrip()
            counted = f"all in {context}" if rules.counted == "callback" and context else f"{group} {context}".rstrip()
            identity = f"{context}{'/' * bool(context)}{self._count(counted)}"
        seen = self._seen_by(group, identity)
        if seen is None or _UNKNOWN in seen:
            return MISMATCH
        slot = seen if rules.match == "identity" and rules.begins != "gives up" else ""
        self.calls[name] = Queued(group, line, self._count(f"line {line}"), seen, "queued", slot)
        self._futures[name] = _Future(context, f"{{{group}}}{seen}", chained=False)
        return None

    def _seen_by(self, group: str, identity: str) -> str | None:
        """`identity` as ranks of `group` write it; None if not all of these ranks know the call or callback."""
        if not identity.startswith("{"):
            return identity
        parent, rest = identity[1:].split("}", 1)
        if parent == group or self._rules.parents == "none":
            return rest
        if self._rules.parents == "difference":
            return f"{self._created[group] - self._created[parent]}:{rest}"
        return f"{parent}:{rest}" if set(self._groups[group]) <= set(self._groups[parent]) else None

    def _run_line(self, context: str) -> str:
        if self._rules.lines == "call" and context:
            return context.split("/")[0]
        return "callbacks" if self._rules.lines == "group" and context else context

    def _count(self, what: str) -> int:
        self._counts[what] = self._counts.get(what, 0) + 1
        return self._counts[what]

    def _can_begin(self, name: str) -> bool:
        call = self.calls[name]
        if call.state != "queued" or sum(c.state == "begun" for c in self.calls.values()) == self._rules.workers:
            return False
        before = [(n, c) for n, c in self.calls.items() if c.line == call.line and c.position < call.position]
        held = self._rules.begins != "at once"
        return all(c.state == "done" and not (held and self._calls_back(n)) for n, c in before)

    def _begin(self, name: str) -> None:
        call = self.calls[name]
        slot = call.slot or str(self._count(f"begun in {call.group}"))
        self.calls[name] = call._replace(state="begun", slot=slot)

    def _calls_back(self, name: str) -> bool:
        """True if callbacks of the call `name` are running and have not been given up."""
        own = self._futures[name].identity + "/"
        running = [frame.context or "" for stack in self.threads.values() for frame in stack]
        return name not in self._marks and any(context.startswith(own) for context in running)

    def _given_up(self, context: str) -> bool:
        return any(context.startswith(self._futures[name].identity + "/") for name in self._marks if name in self.calls)

    # Threads

    def _waits(self, frame: _Frame) -> bool:
        return isinstance(self._program[frame.body][frame.at], Wait)

    def _can_step(self, thread: str) -> bool:
        frame = self.threads[thread][-1]
        if frame.context is None or frame.at == len(self._program.get(frame.body, ())):
            return True
        statement = self._program[frame.body][frame.at]
        if isinstance(statement, Wait):
            return statement.future in self._futures and self._futures[statement.future].done
        if isinstance(statement, Destroy):
            calls = [(n, c) for n, c in self.calls.items() if c.group == statement.group]
            late = self._rules.leaves == "after callbacks"
            return all(c.state == "done" and not (late and self._calls_back(n)) for n, c in calls)
        if isinstance(statement, Call):
            return True
        futures = statement.futures if isinstance(statement, All) else (statement.future,)
        return all(future in self._futures for future in futures)

    def _step(self, thread: str) -> str | None:
        *below, frame = self.threads[thread]
        if frame.context is None:
            self.threads[thread] = (*below, frame._replace(context=self._place(frame.future, "")))
            return None
        body = self._program.get(frame.body, ())
        if frame.at == len(body):
            self.threads[thread] = tuple(below)
            if not below:
                del self.threads[thread]
            if frame.result:
                self._complete(frame.result, thread)
            return None
        self.threads[thread] = (*below, frame._replace(at=frame.at + 1))
        statement = body[frame.at]
        if isinstance(statement, Call):
            return self._call(statement, frame.context)
        if isinstance(statement, Then):
            self._attach(statement, frame.context, thread)
        elif isinstance(statement, All):
            self._collect(statement, frame.context)
        elif isinstance(statement, Destroy):
            self._marks[statement.group] = True
        return None

    # Futures

    def _place(self, future: str, attacher: str) -> str:
        """The identity of the next callback that the line `attacher` attaches to `future`."""
        line, identity, chained, *_ = self._futures[future]
        if not identity:
            return ""
        by = self._seen_by(identity[1:].split("}")[0], attacher)
        by = _UNKNOWN if by is None else by or "program"
        foreign = f"({by})" if self._rules.places == "line" and attacher != line else ""
        callback = f"{identity}{'.' if chained else '/'}{foreign}"
        return f"{callback}{self._count(f'callbacks {callback}')}"

    def _attach(self, statement: Then, attacher: str, thread: str) -> None:
        future = self._futures[statement.future]
        at_run = self._rules.places == "run" and future.identity != ""
        context = None if at_run else self._place(statement.future, attacher)
        identity = (context or statement.child) if self._rules.chained else ""
        self._futures[statement.child] = _Future(future.line, identity, chained=True)
        frame = _Frame(statement.body, 0, context, statement.child, statement.future)
        if not future.done:
            self._futures[statement.future] = future._replace(callbacks=(*future.callbacks, frame))
        elif self._rules.late == "callback":
            self.threads[thread] += (frame,)
        else:
            self.threads[thread] += (frame._replace(context=attacher),)

    def _collect(self, statement: All, attacher: str) -> None:
        identity = self._place(statement.futures[0], attacher) if self._rules.collected else ""
        pending = [future for future in statement.futures if not self._futures[future].done]
        line = self._futures[statement.futures[0]].line
        self._futures[statement.child] = _Future(line, identity, chained=True, done=not pending)
        for name in pending:
            frame = _Frame("collect", 0, "", statement.child, name)
            self._futures[name] = self._futures[name]._replace(callbacks=(*self._futures[name].callbacks, frame))

    def _complete(self, name: str, thread: str | None) -> None:
        """Complete a future and start its callbacks. `thread` is the thread that completes it, None for a worker."""
        future = self._futures[name]
        if future.done or not all(self._futures[part].done for part in self._parts.get(name, ())):
            return
        self._futures[name] = future._replace(done=True, callbacks=())
        if not future.callbacks:
            return
        if self._rules.threads == "callback":
            for frame in future.callbacks:
                self.threads[f"{frame.result} of {name}"] = (frame,)
        elif self._rules.threads == "one":
            self.threads["one"] = (*future.callbacks[::-1], *self.threads.get("one", ()))
        else:
            thread = thread or f"callbacks of {name}"
            self.threads[thread] = (*self.threads.get(thread, ()), *future.callbacks[::-1])
