"""A plain model of a store: which messages must be in it, after anything that was done to it.

The model knows queues of messages, and nothing of files. It shares no code with the store. What is really there is
given to it as `Found`, and `Model.compare` says what is wrong.

An operation is noted in the model before it begins (`Model.begin`), with the messages that it leaves, and once more
when it returned (`Model.returned`). So a process may die at any moment. The next comparison then explains each message
that is there by an operation, and checks what was promised:

    what returned              is there after a kill, unless its result says that it is not committed
    what is durable            is there after a power cut: it returned with SYNC_FLUSH, or lies below something that did
    what was refused           is never there
    what is in doubt           is there as a whole, or not at all
    what was found once        is there for ever, with the same number, until retention may delete it
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from crash.judge import Verdict

SCHEDULE_TOPIC = "SCHEDULE_TOPIC_XXXX"
HALF_TOPIC, OP_TOPIC = "RMQ_SYS_TRANS_HALF_TOPIC", "RMQ_SYS_TRANS_OP_HALF_TOPIC"
DISCARD_TOPIC = "TRANS_CHECK_MAX_TIME_TOPIC"
BATCH_TOPIC = "rmq_sys_spark_sink"
OPEN, COMMITTED, ROLLED_BACK, DISCARDED, DELETED = "open", "committed", "rolled back", "discarded", "deleted"
LIVES, CLOSED, KILLED, POWER_CUT = "lives", "closed", "killed", "power cut"
"""How the process of the last operations ended."""
Queue = tuple[str, int]


@dataclass(frozen=True)
class Found:
    """One message that is in a queue.

    Parameters
    ----------
    number : int
        Its number in the queue.
    body : bytes
    place : int
        Its physical offset.
    store_ms : int
    """

    number: int
    body: bytes
    place: int
    store_ms: int


Contents = Mapping[Queue, Sequence[Found]]


@dataclass(frozen=True)
class Wait:
    """Where a delayed message goes, and when.

    Parameters
    ----------
    target : Queue
    delay_ms : int
        The delay of its level, at the time of its put.
    put_ms : int
        The true time of its put, which no jump of a clock changes.
    jumps : int
        How often the clock had jumped until then.
    sent_back : int
        How often the message will have been sent back when it arrives.
    """

    target: Queue
    delay_ms: int
    put_ms: int
    jumps: int
    sent_back: int = 0


@dataclass(frozen=True)
class Effect:
    """One message that an operation leaves in a queue; `wait` in a queue of delayed messages."""

    queue: Queue
    body: bytes
    wait: Wait | None = None
    sent_back: int = 0


@dataclass(eq=False)
class Operation:
    """Something that a process asks of the store.

    Parameters
    ----------
    what : str
        For messages.
    effects : tuple of Effect
        The messages that it leaves: all of them, or none.
    batch : tuple of (str, int) | None
        The app and the version that the store knows afterwards.
    half : tuple of (bytes, str) | None
        The half message that it ends, and how.
    process : int
        The operations of one process lie in the log in the order of its calls.
    """

    what: str
    effects: tuple[Effect, ...] = ()
    batch: tuple[str, int] | None = None
    half: tuple[bytes, str] | None = None
    process: int = 0
    side_by_side: bool = False
    """A power cut may leave its first messages without the others."""
    moves: tuple[tuple[str, Queue, int], ...] = ()
    """Consumer groups, queues and offsets: where the groups are if the messages are there."""
    done: bool = False
    committed: bool = False
    durable: bool = False


@dataclass(eq=False)
class Slot:
    """A message that was found in a queue."""

    found: Found
    wait: Wait | None = None
    delivered: bool = False
    sent_back: int = 0


@dataclass
class Half:
    """A half message: the queue of its message, how it ended, and how often somebody was asked about it."""

    target: Queue
    state: str = OPEN
    asked: int = 0


@dataclass
class Model:
    """Which messages must be in a store.

    Attributes
    ----------
    queues : dict of Queue -> list of Slot
        What was found last, in the order of the queue, without what retention has deleted.
    following : dict of Queue -> set of int
        The numbers that the next message of a queue without messages may have.
    pending : list of Operation
        What was asked for since the last comparison, in this order.
    batches : dict of str -> dict of int -> tuple of bytes
        App -> version -> the bodies of its rows.
    halves : dict of bytes -> Half
        By their bodies.
    read : dict of str -> dict of Queue -> int
        How far each consumer group has read.
    begin : int
        The physical offset at which the log begins.
    gone : set of int
        The physical offsets of messages whose topic was deleted: their records stay in the log, and no queue has them.
    deleted : set of str
        The topics that were deleted, also those that were made again.
    arrived : list of Slot
        The delayed messages that the last comparison found delivered.
    """

    queues: dict[Queue, list[Slot]] = field(default_factory=dict)
    following: dict[Queue, set[int]] = field(default_factory=dict)
    pending: list[Operation] = field(default_factory=list)
    batches: dict[str, dict[int, tuple[bytes, ...]]] = field(default_factory=dict)
    halves: dict[bytes, Half] = field(default_factory=dict)
    read: dict[str, dict[Queue, int]] = field(default_factory=dict)
    begin: int = 0
    gone: set[int] = field(default_factory=set)
    deleted: set[str] = field(default_factory=set)
    arrived: list[Slot] = field(default_factory=list)

    # ---- what is done

    def delete(self, topic: str, *, forgotten: bool = False) -> None:
        """Note that a topic was deleted: its numbers begin again, and nobody has read anything of it.

        With `forgotten`, no group reads it any more; otherwise their progress is there, and is lowered.
        """
        self.deleted.add(topic)
        for queue in [queue for queue in self.queues if queue[0] == topic]:
            self.gone.update(slot.found.place for slot in self.queues.pop(queue))
            self.following[queue] = {0}
        for offsets in self.read.values():
            for queue in [queue for queue in offsets if queue[0] == topic]:
                offsets[queue] = 0
                if forgotten:
                    del offsets[queue]

    def begins(self, operation: Operation) -> Operation:
        """Note what a process is about to ask for."""
        self.pending.append(operation)
        return operation

    def returned(self, operation: Operation, *, durable: bool, committed: bool = True) -> None:
        """Note that an operation returned. It commits and makes durable what lies below it, too."""
        operation.done = True
        if committed:
            self.commit()
        if durable:
            self.flush()

    def refused(self, operation: Operation) -> None:
        """Note that an operation wrote nothing."""
        self.pending.remove(operation)

    def commit(self) -> None:
        """Note that all that returned is in the files of the log."""
        for operation in self.pending:
            operation.committed = operation.committed or operation.done

    def flush(self) -> None:
        """Note that all that returned is on the disk."""
        self.commit()
        for operation in self.pending:
            operation.durable = operation.durable or operation.done

    def synced(self, batch: tuple[str, int]) -> None:
        """Note that a batch came again with SYNC_FLUSH and is known: it is on the disk, with what lies below it."""
        last = max((n for n, operation in enumerate(self.pending) if operation.batch == batch), default=-1)
        for operation in self.pending[: last + 1]:
            operation.committed = operation.durable = operation.done

    # ---- what is there

    def expected(self, queue: Queue) -> list[bytes]:
        """The bodies of a queue as its readers should see them, if nothing is in doubt."""
        done = (effect for operation in self.pending if operation.done for effect in operation.effects)
        return [slot.found.body for slot in self.queues.get(queue, ())] + [e.body for e in done if e.queue == queue]

    def next_numbers(self, queue: Queue) -> set[int]:
        """The numbers that the next message may get; none if something is in doubt."""
        if any(not operation.done and operation.effects for operation in self.pending):
            return set()
        slots = self.queues.get(queue)
        first = {slots[-1].found.number + 1} if slots else self.following.get(queue, {0})
        return {number + len(self.expected(queue)) - len(slots or ()) for number in first}

    def waiting(self) -> Iterator[tuple[int, Slot, Wait]]:
        """The delayed messages that were not delivered, as (level, slot, wait), in the order of their queues."""
        for (topic, queue_id), slots in sorted(self.queues.items()):
            if topic == SCHEDULE_TOPIC:
                for slot in slots:
                    if slot.wait is not None and not slot.delivered:
                        yield queue_id + 1, slot, slot.wait

    def open_halves(self) -> list[bytes]:
        return [body for body, half in self.halves.items() if half.state == OPEN]

    def unread(self, group: str, queue: Queue) -> list[Slot]:
        """The messages of a queue that a group has not read. It reads each topic in which it has read anything."""
        offsets = dict(self.read.get(group, {}))
        for operation in self.pending:
            offsets.update({moved: offset for who, moved, offset in operation.moves if who == group})
        if queue[0] not in {topic for topic, _ in offsets}:
            return []
        return [slot for slot in self.queues.get(queue, ()) if slot.found.number >= offsets.get(queue, 0)]

    # ---- what is found

    def deleted_below(self, log_begin: int, ignored: Iterable[str] = ()) -> Verdict:
        """Retention has deleted what lies below a place. Check that nobody needs it, and forget it.

        Parameters
        ----------
        ignored : iterable of str
            What does not count: consumer groups, `SCHEDULE_TOPIC`, `HALF_TOPIC`.
        """
        verdict, needless = Verdict(), set(ignored)
        if log_begin < self.begin:
            verdict.misread.append(f"the log begins at {log_begin}, and began at {self.begin}")
            return verdict

        if SCHEDULE_TOPIC not in needless:
            verdict.lost += [
                f"retention deleted delayed message {slot.found.body[:24]!r} before it was delivered"
                for _, slot, _ in self.waiting()
                if slot.found.place < log_begin
            ]

        last_half = {slot.found.body: slot.found.place for slot in self.queues.get((HALF_TOPIC, 0), ())}
        for body in self.open_halves():
            if last_half.get(body, log_begin) < log_begin:
                self.halves[body].state = DELETED
                if HALF_TOPIC not in needless:
                    verdict.lost.append(f"retention deleted open half message {body[:24]!r}")

        verdict.lost += [
            f"retention deleted {queue} {slot.found.number}, which {group} has not read"
            for group in self.read
            if group not in needless
            for queue in self.queues
            for slot in self.unread(group, queue)
            if slot.found.place < log_begin
        ]

        self.begin = log_begin
        for queue, slots in self.queues.items():
            while slots and slots[0].found.place < log_begin:
                self.following[queue] = {slots.pop(0).found.number + 1}
        return verdict

    def compare(self, contents: Contents, ended: str, open_halves: Iterable[bytes] | None = None) -> Verdict:
        """Compare the model with what is there, and take over what was in doubt.

        Call it when the store is open again, or after a flush: what is found is then durable.

        Parameters
        ----------
        contents : mapping of Queue to sequence of Found
            Each queue from its first message on, without those below `begin`.
        ended : str
            How the last process ended.
        open_halves : iterable of bytes | None
            The bodies of the half messages that are open; None: not known.
        """
        self.arrived = []
        comparison = _Comparison(self, contents, ended)
        comparison.run()
        if open_halves is not None:
            comparison.halves(set(open_halves))
        comparison.settle()
        return comparison.verdict


class _Comparison:
    def __init__(self, model: Model, contents: Contents, ended: str) -> None:
        self.model, self.contents, self.ended = model, contents, ended
        self.verdict = Verdict()
        self.effects: dict[Queue, list[tuple[int, Effect]]] = {}
        """What the pending operations leave in each queue, with the numbers of the operations."""
        self.places: dict[int, list[int]] = {}
        """Where the messages of each pending operation lie."""

    def run(self) -> None:
        for number, operation in enumerate(self.model.pending):
            for effect in operation.effects:
                self.effects.setdefault(effect.queue, []).append((number, effect))
        # Delayed messages come first: what was delivered from there is explained by them
        for queue in sorted({*self.model.queues, *self.contents}, key=lambda each: (each[0] != SCHEDULE_TOPIC, each)):
            if queue[0] != BATCH_TOPIC:
                self._queue(queue, self.contents.get(queue, ()))
        self._operations()

    def _queue(self, queue: Queue, found: Sequence[Found]) -> None:
        verdict, slots = self.verdict, self.model.queues.setdefault(queue, [])
        following = self.model.following.setdefault(queue, {0})
        if slots:
            following = {slots[-1].found.number + 1}
        for at, slot in enumerate(slots):
            if at >= len(found) or found[at] != slot.found:
                there = {each.body for each in found}
                lost = [each.found.body for each in slots[at:] if each.found.body not in there]
                verdict.lost += [f"{_words(queue)}: {body[:24]!r}, which was found before" for body in lost]
                if not lost:
                    verdict.misread.append(
                        f"{_words(queue)}: {slot.found} was found before, and now {found[at : at + 1]}"
                    )
                return  # what follows would only say it again
        more = found[len(slots) :]
        if more and more[0].number not in following:
            verdict.misread.append(f"{_words(queue)}: the next message has number {more[0].number}, not {following}")
        elif more and not slots and more[0].number < max(following):  # the queue begins anew
            for offsets in self.model.read.values():
                if queue in offsets:
                    offsets[queue] = 0
        if [each.number for each in more] != list(range(more[0].number, more[0].number + len(more)) if more else ()):
            verdict.misread.append(f"{_words(queue)}: its numbers are {[each.number for each in found]}")
        self._leave_out_doubtful(queue, Counter(each.body for each in more))
        for each in more:
            slots.append(self._explained(queue, each))

    def _leave_out_doubtful(self, queue: Queue, there: Mapping[bytes, int]) -> None:
        """Forget operations that failed, where another one left the same body in the same queue, and not all are there.

        One message is sent back for two groups, the first time in vain: what is found is the second one's.
        """
        effects = self.effects.get(queue, [])
        for body, asked in Counter(effect.body for _, effect in effects).items():
            doubtful = [each for each in effects if each[1].body == body and not self.model.pending[each[0]].done]
            for each in doubtful[: max(0, asked - there.get(body, 0))]:
                effects.remove(each)

    def _explained(self, queue: Queue, found: Found) -> Slot:
        """Find out who left a message."""
        model, effects = self.model, self.effects.get(queue, [])

        for at, (number, effect) in enumerate(effects):
            if effect.body == found.body:
                del effects[at]
                self.places.setdefault(number, []).append(found.place)
                return Slot(found, effect.wait, sent_back=effect.sent_back)

        # The same message may have been sent back twice, and wait at two levels: the one that is due first comes first.
        waiting = [
            (wait.put_ms + wait.delay_ms, at, slot, wait)
            for at, (_, slot, wait) in enumerate(model.waiting())
            if (wait.target, slot.found.body) == (queue, found.body)
        ]
        if waiting:
            _, _, slot, wait = min(waiting)
            slot.delivered = True
            model.arrived.append(slot)
            return Slot(found, sent_back=wait.sent_back)

        half = model.halves.get(found.body)
        if queue[0] == OP_TOPIC or (queue[0] == HALF_TOPIC and half is not None):
            return Slot(found)
        if queue[0] == DISCARD_TOPIC and half is not None and half.state == OPEN:
            half.state = DISCARDED
            return Slot(found)

        earlier = any(slot.found.body == found.body for slot in model.queues[queue])
        text = f"{_words(queue)}: {found.body[:24]!r} at number {found.number}"
        if earlier:
            self.verdict.duplicated.append(f"{text} is there for the second time")
        else:
            self.verdict.misread.append(f"{text}, and nobody put it there")
        return Slot(found)

    def _operations(self) -> None:
        """Check that each operation left all or nothing, what it promised, and in the order of the calls."""
        verdict = self.verdict
        last: dict[int, int] = {}
        missing: dict[int, str] = {}

        for number, operation in enumerate(self.model.pending):
            places, wanted, process = self.places.get(number, []), len(operation.effects), operation.process
            whole = len(places) == wanted
            if not wanted:
                continue

            if not whole and self._promised(operation):
                verdict.lost.append(f"{operation.what}: {len(places)} of {wanted} messages are there")
            elif places and not whole and not (operation.side_by_side and self.ended == POWER_CUT):
                verdict.misread.append(f"{operation.what}: {len(places)} of {wanted} messages are there")

            if not whole and operation.done:
                missing.setdefault(process, operation.what)
            if places and operation.done and process in missing and whole:
                verdict.misread.append(f"{operation.what} is there, and {missing[process]} is not, which came before")

            if places:
                if min(places) < last.get(process, -1):
                    verdict.misread.append(f"{operation.what} lies below what the same process put before")
                last[process] = max(last.get(process, -1), *places)

    def _promised(self, operation: Operation) -> bool:
        if self.ended == POWER_CUT:
            return operation.durable
        return operation.done and (operation.committed or self.ended != KILLED)

    # ---- half messages

    def halves(self, open_now: set[bytes]) -> None:
        """Compare the half messages that are open with what the operations say about them."""
        model, verdict = self.model, self.verdict
        ends: dict[bytes, list[Operation]] = {}
        for operation in model.pending:
            if operation.half is not None:
                ends.setdefault(operation.half[0], []).append(operation)

        in_queue = {slot.found.body for slot in model.queues.get((HALF_TOPIC, 0), ())}
        for body, half in model.halves.items():
            wishes = {operation.half[1]: operation for operation in ends.get(body, ()) if operation.half is not None}
            count = sum(slot.found.body == body for slot in model.queues.get(half.target, ()))

            name, is_open = f"half message {body[:24]!r}", body in open_now
            if is_open:
                for operation in wishes.values():
                    if self._promised(operation):
                        verdict.lost.append(f"{operation.what}: it is open")
                if half.state not in (OPEN, DELETED):
                    verdict.misread.append(f"{name} was {half.state}, and is open again")
                if count:
                    verdict.misread.append(f"{name} is open, and its message is there")
            elif half.state == OPEN and body in in_queue:
                half.state = COMMITTED if COMMITTED in wishes and (count or ROLLED_BACK not in wishes) else ROLLED_BACK
                if half.state not in wishes:
                    verdict.lost.append(f"{name} is not open, and nobody has ended it")

            if half.state in (ROLLED_BACK, DISCARDED) and count:
                verdict.misread.append(f"{name} was {half.state}, and its message is there")

        for body in open_now - model.halves.keys():
            verdict.misread.append(f"half message {body[:24]!r} is open, and nobody prepared it")

    # ---- what is known now

    def settle(self) -> None:
        """Take over what was found."""
        model = self.model
        left = []
        for number, operation in enumerate(model.pending):
            there = number in self.places or (not operation.effects and operation.done)
            if there and operation.batch is not None:
                app, version = operation.batch
                model.batches.setdefault(app, {})[version] = tuple(effect.body for effect in operation.effects)
                for group, queue, offset in operation.moves:
                    model.read.setdefault(group, {})[queue] = offset
            if not there and self.ended == LIVES:
                left.append(operation)  # the next process may still find it
            if not there and self.ended != LIVES:
                for effect in operation.effects:
                    if effect.queue == (HALF_TOPIC, 0):
                        model.halves.pop(effect.body, None)  # its process was told that it is not on the disk yet
        model.pending = left
        for queue, slots in model.queues.items():
            if slots:
                model.following[queue] = {slots[-1].found.number + 1}
        if self.ended == LIVES:
            return
        for offsets in model.read.values():  # what a group has read and a crash took is lowered by whoever recovers
            for queue in offsets:
                offsets[queue] = min(offsets[queue], max(model.following.get(queue, {0})))


def count_of(contents: Contents) -> Counter[bytes]:
    """How often each body is there, over all queues."""
    return Counter(found.body for queue in contents.values() for found in queue)


def _words(queue: Queue) -> str:
    return f"{queue[0]}/{queue[1]}"
