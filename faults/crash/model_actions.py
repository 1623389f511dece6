"""The actions of the mode `model`: what a process, a machine or an operator may do to a store.

Each action is a function of a `World`, its own number in the history, and its own random numbers. It notes in the model
what it is about to do, does it, and notes what was promised. What an action needs and does not find (an open half
message, a known batch), it leaves out.
"""

from __future__ import annotations

import copy
import errno
import itertools
import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from crash.model_world import (
    APPS,
    GROUPS,
    HOUR_MS,
    PRODUCERS,
    QUEUES,
    RETRY_MAX,
    STORED,
    TOPICS,
    Copy,
    Died,
    World,
    body_of,
    columns_of,
    message_of,
)
from crash.plain_model import (
    CLOSED,
    COMMITTED,
    HALF_TOPIC,
    ROLLED_BACK,
    SCHEDULE_TOPIC,
    Effect,
    Half,
    Operation,
    Queue,
    Wait,
)
from messagestore import (
    ASYNC_FLUSH,
    SYNC_FLUSH,
    BatchConflictError,
    BatchRequest,
    BatchResult,
    ConfigError,
    ConsumedMessage,
    Consumer,
    LocalTransactionState,
    LostBatchesError,
    MessageBatch,
    MessageExt,
    MessageIllegalError,
    MessageStore,
    PutMessageResult,
    StoreLockedError,
    UnknownTopicError,
    alter_stored_config,
)
from messagestore.files.consumer_offsets import publish_offsets

_TIMEOUT_S = 30.0
Act = Callable[[World, int, random.Random], None]


def _queue(chance: random.Random) -> Queue:
    return chance.choice(TOPICS), chance.randrange(QUEUES)


def _size(chance: random.Random) -> int:
    return chance.choice([0, 0, 20, 120, 400])


# ---- puts


def put(world: World, at: int, chance: random.Random) -> None:
    """Put one message, perhaps a delayed one."""
    store, queue, body = world.session(chance), _queue(chance), body_of(at, 0, _size(chance))
    level = chance.choice([0, 0, 0, 1, 2, 3, 9])
    effect = world.effect(queue, body, level)
    numbers = world.model.next_numbers(effect.queue)
    operation = Operation(f"put {at} to {effect.queue}", (effect,))
    result = world.append(operation, lambda: store.put_message(message_of(queue, body, level)))
    world.check_number(effect.queue, numbers, result)


def puts(world: World, at: int, chance: random.Random) -> None:
    """Put several messages side by side."""
    store, queue = world.session(chance), _queue(chance)
    bodies = [body_of(at, number) for number in range(chance.randint(1, 4))]
    effects = tuple(world.effect(queue, body) for body in bodies)
    operation = Operation(f"puts {at} to {queue}", effects, side_by_side=True)
    numbers = world.model.next_numbers(queue)
    batch = MessageBatch.from_messages([message_of(queue, body) for body in bodies])
    result = world.append(operation, lambda: store.put_messages(batch))
    world.check_number(queue, numbers, result)


def put_async(world: World, at: int, chance: random.Random) -> None:
    """Put several messages, all of which are in flight before one is synced."""
    store = world.session(chance)
    one_way = chance.random() < 0.3
    started: list[tuple[Operation, Future[PutMessageResult] | None]] = []
    count = chance.randint(1, 4)
    with world.trying(f"async {at}"), store.writer.mutex:  # the flush thread waits for it: a history has one order
        for number in range(count):
            queue, body = _queue(chance), body_of(at, number)
            operation = world.model.begins(Operation(f"async {at}/{number} to {queue}", (world.effect(queue, body),)))
            message = message_of(queue, body)
            if one_way:
                store.put_message_oneway(message)
                started.append((operation, None))
            else:
                started.append((operation, store.put_message_async(message)))
    died = None
    for operation, future in started:
        if future is None:
            continue
        try:
            world.append(operation, partial(future.result, _TIMEOUT_S))
        except Died as error:
            died = error
    if one_way:
        with world.trying(f"one-way {at}"):
            store.flush()  # nobody is told about them: they are what is left
        if world.disk.dead:  # in a put, which told nobody
            raise Died(f"one-way {at}")
        for operation, _ in started:
            if not world.disk.faulty:
                world.model.returned(operation, durable=True)
    if died is not None:
        raise died


# ---- batches


def batch(world: World, at: int, chance: random.Random) -> None:
    """Append the next version of an app."""
    store, app = world.session(chance), chance.choice(APPS)
    version = world.next_version(app)
    if version is None:
        return
    rows = [
        (_queue(chance), body_of(at, number), chance.choice([0, 0, 0, 1, 2]))
        for number in range(chance.choice([1, 2, 5, 12]))
    ]
    _append(world, at, chance, store, app, version, rows)


def _pending(world: World) -> list[tuple[str, int]]:
    return [operation.batch for operation in world.model.pending if operation.batch is not None]


def _append(
    world: World,
    at: int,
    chance: random.Random,
    store: MessageStore,
    app: str,
    version: int,
    rows: list[tuple[Queue, bytes, int]],
) -> None:
    flush = chance.choice([SYNC_FLUSH, ASYNC_FLUSH])
    world.rows[app, version] = rows
    effects = tuple(world.effect(*row) for row in rows)
    operation = Operation(f"batch {app} {version} ({at})", effects, batch=(app, version))
    request = BatchRequest(app_id=app, version=version, version_source="spark", flush_disk_type=flush)
    result = world.append(operation, lambda: store.append_batch(_parts(rows, chance), request), flush=flush)
    if result is not None and result.status != "appended":
        world.verdict.lost.append(f"{operation.what}: it is new, and the store says {result.status}")


def _parts(rows: Sequence[tuple[Queue, bytes, int]], chance: random.Random) -> list[Any]:
    """Rows in any number of partitions, in any order of these."""
    cuts = sorted({0, len(rows), *(chance.randrange(len(rows) + 1) for _ in range(chance.randrange(3)))})
    parts = [columns_of(rows[low:high]) for low, high in itertools.pairwise(cuts)]
    chance.shuffle(parts)
    return parts


def replay(world: World, at: int, chance: random.Random) -> None:
    """Send a batch again, as Spark does, in other partitions; sometimes with another row, which is refused."""
    store = world.session(chance)

    unsure = {operation.batch for operation in world.model.pending if operation.batch and not operation.done}
    known = [(app, version) for app, versions in world.model.batches.items() for version in versions]
    known += [each for each in _pending(world) if each not in unsure]
    known = [each for each in known if each not in unsure and each in world.rows]
    if not known:
        return

    app, version = chance.choice(sorted(set(known))[-4:])
    rows = world.rows[app, version]
    changed = chance.random() < 0.3
    if changed:
        rows = [*rows, (_queue(chance), body_of(at, 0), 0)]

    request = BatchRequest(app_id=app, version=version, version_source="spark")
    world.note(f"replay {app} {version}{', changed' if changed else ''}")
    status = "conflict"
    with world.trying("replay"):
        try:
            status = store.append_batch(_parts(rows, chance), request).status
        except BatchConflictError:
            pass

    if changed and status != "conflict":
        world.wrong(f"replay of {app} {version} with another row: {status}")
    if not changed and status != "known":
        world.verdict.duplicated.append(f"replay of {app} {version}: {status}")
    if not changed:
        world.model.synced((app, version))


def gap(world: World, at: int, chance: random.Random) -> None:
    """Go on behind batches that the store does not have, which is refused."""
    store, app = world.session(chance), chance.choice(APPS)
    known = [*world.model.batches.get(app, {}), *(v for a, v in _pending(world) if a == app)]
    if not known:
        return
    version = max(known) + 2 + chance.randrange(3)
    request = BatchRequest(app_id=app, version=version, version_source="spark")
    try:
        with world.trying("gap"):
            store.append_batch(columns_of([(_queue(chance), body_of(at, 0), 0)]), request)
    except LostBatchesError:
        return
    world.verdict.lost.append(f"{app}: version {version} was appended behind {max(known)}")


def turn(world: World, at: int, chance: random.Random) -> None:
    """Let another process take a turn, as a Spark query or a deliverer does; refused while a session is open."""
    holder = world.holder
    actor = chance.choice([each for each in world.actors if each is not holder])
    config = world.settings(chance).replace(transient_store_pool_enable=False)

    if holder is not None and chance.random() < 0.8:
        world.close()
        holder = None

    if holder is not None:
        world.note(f"process {actor.number} tries to open the store")
        try:
            with world.trying("a second writer"), world.acting(actor):
                MessageStore.open(world.root, config, disk=world.disk).close()
        except StoreLockedError:
            return
        finally:
            world.end(actor)
        world.wrong("two processes have the store open at the same time")
        return

    if world.ended != CLOSED and world.ended != "lives":
        world.open(actor, config)
        return
    world.turn(actor, config, at, chance)


# ---- time and deliveries


def passes(world: World, at: int, chance: random.Random) -> None:
    """Let time pass."""
    world.pass_time(chance.choice([1, 500, 1000, 5000, 30_000, HOUR_MS, 3 * HOUR_MS]))
    world.note(f"time passes: {world.true_ms} ms")


def jumps(world: World, at: int, chance: random.Random) -> None:
    """Set the clock ahead or back."""
    ms = chance.choice([-3000, -HOUR_MS // 2, -2 * HOUR_MS, 3000, HOUR_MS // 2, 2 * HOUR_MS])
    world.jump(ms)
    world.note(f"the clock jumps by {ms} ms")


def deliver(world: World, at: int, chance: random.Random) -> None:
    """Deliver what is due, in one round or in small ones."""
    store = world.session(chance)
    config = world.config
    world.deliveries.append((world.true_ms, world.wall_ms, config.delays_ms))
    before, world.delivered_count = world.delivered_count, None
    rows = chance.choice([1, 3, 16_384])
    with world.trying("deliver"):
        services = store._attached.services
        store.writer.check_usable()
        assert services is not None
        if config.transient_store_pool_enable:
            store.flush()  # the thread that commits the pool has no time here, and only what it commits is delivered
            world.model.flush()
        count = world.rounds(lambda: services.delivery.deliver(rows).count)
    world.note(f"deliver: {count}")
    if before is not None:
        world.delivered_count = before + count
    if count:  # a delivery is durable, with everything below it
        world.model.flush()
    world.compare(store, lives=True)
    world.check_late()


# ---- half messages


def prepare(world: World, at: int, chance: random.Random) -> None:
    store, queue, body = world.session(chance), _queue(chance), body_of(at, 0)
    world.model.halves[body] = Half(queue)
    operation = Operation(f"prepare {at}", (Effect((HALF_TOPIC, 0), body),))
    half = world.append(operation, lambda: store.half_message(message_of(queue, body), PRODUCERS))
    if half is not None:
        world.half_ids[body] = half.message_id
        world.model.returned(operation, durable=False, committed=half.result.committed)


def finish(world: World, at: int, chance: random.Random) -> None:
    """Commit or roll back a half message; one that has ended refuses the other end."""
    store = world.session(chance)
    bodies = [body for body in world.half_ids if body in world.model.halves]
    if not bodies:
        return
    body = chance.choice(sorted(bodies))
    world.end_half(store, body, chance.choice([COMMITTED, ROLLED_BACK]))


def check(world: World, at: int, chance: random.Random) -> None:
    """Ask about the half messages that are due."""
    store = world.session(chance)
    world.compare(store, lives=True)
    halves, asked = world.model.halves, []
    open_before = set(world.model.open_halves())
    answers = {body: chance.choice(list(LocalTransactionState)) for body in sorted(open_before)}
    operations: dict[bytes, Operation] = {}
    for body, answer in answers.items():
        if answer is not LocalTransactionState.UNKNOW:
            commits = answer is LocalTransactionState.COMMIT_MESSAGE
            effects = (Effect(halves[body].target, body),) if commits else ()
            operations[body] = Operation(
                f"check {at} of {body!r}: {answer.name}",
                effects,
                half=(body, COMMITTED if commits else ROLLED_BACK),
                process=1000 * at + len(operations) + 1,  # several are ended at once, in any order
            )
            world.model.begins(operations[body])

    def ask(message: MessageExt) -> LocalTransactionState:
        asked.append(message.body)
        if message.body not in open_before:
            world.wrong(f"{message.body!r} was checked, and is not open")
            return LocalTransactionState.UNKNOW
        halves[message.body].asked += 1
        if (message.topic, message.queue_id) != halves[message.body].target:
            world.wrong(f"{message.body!r} is checked as a message for {message.topic}/{message.queue_id}")
        return answers[message.body]

    with world.trying("check"):
        store.check_halves(ask)
    world.note(f"check: {len(asked)} of {len(open_before)}")
    for body, operation in operations.items():
        if body in asked:
            world.model.returned(operation, durable=False)
        else:
            world.model.pending.remove(operation)
    if len(asked) != len(set(asked)):
        world.wrong("a half message was checked twice in one round")
    world.compare(store, lives=True)


# ---- messages that are sent back


def send_back(world: World, at: int, chance: random.Random) -> None:
    """Send a message back, as a consumer does that cannot process it."""
    store, group = world.session(chance), chance.choice(GROUPS)
    world.compare(store, lives=True)

    queues = [queue for queue in world.model.queues if queue[0] in (*TOPICS, f"%RETRY%{group}")]
    slots = [(queue, slot) for queue in sorted(queues) for slot in world.model.queues[queue]]
    if not slots:
        return

    queue, slot = chance.choice(slots)
    with world.trying("read"):
        if store.group_config(group) is None:
            store.create_group(group, retry_max_times=RETRY_MAX)
        message = store.get_message(*queue, slot.found.number, 1).messages[0]

    delays_ms, times = world.config.delays_ms, slot.sent_back
    if message.reconsume_times != times:
        world.wrong(f"{queue}: {slot.found} was sent back {times} times, and says {message.reconsume_times}")

    dead = times >= RETRY_MAX or chance.random() < 0.1
    level = min(3 + times, len(delays_ms))
    retry, letters = (f"%RETRY%{group}", 0), (f"%DLQ%{group}", 0)
    wait = Wait(retry, delays_ms[level - 1], world.true_ms, world.jumps, times + 1)
    effect = Effect(letters, slot.found.body) if dead else Effect((SCHEDULE_TOPIC, level - 1), slot.found.body, wait)

    operation = Operation(f"send back {at} to {effect.queue}", (effect,))
    world.append(operation, lambda: store.send_back(message, group, -1 if dead and times < RETRY_MAX else None))


# ---- groups, retention


def publish(world: World, at: int, chance: random.Random) -> None:
    """Let a consumer group go on, to anywhere in a queue."""
    store, group, queue = world.session(chance), chance.choice(GROUPS), _queue(chance)
    world.compare(store, lives=True)
    slots = world.model.queues.get(queue, [])
    if not slots:
        return
    number = chance.choice([slots[-1].found.number + 1, chance.choice(slots).found.number])
    world.note(f"{group} has read {queue} up to {number}")
    with world.trying("publish"), world.moving(group, {queue: number}):
        publish_offsets(world.path, group, {queue: number}, world.disk)


def consume(world: World, at: int, chance: random.Random) -> None:
    """Let a consumer read, and commit nothing, everything or a part."""
    group, most = chance.choice(GROUPS), chance.choice([1, 3, 500])
    world.compare(world.session(chance), lives=True)
    with world.consumer(group) as consumer:
        messages = _poll(world, consumer, most)
        if chance.random() < 0.3:
            return
        if messages and chance.random() < 0.4:
            message = chance.choice(messages)
            offsets = {message.queue: message.queue_offset + 1}
            with world.moving(group, offsets):
                consumer.commit(message)
        else:
            offsets = {queue: consumer.position(queue) for queue in consumer.assignment()}
            with world.moving(group, offsets):
                consumer.commit()
    world.note(f"{group} commits {offsets}")


def _poll(world: World, consumer: Consumer, most: int) -> list[ConsumedMessage]:
    """What a consumer hands out, after a comparison with what is in its queues."""
    begins = {queue: consumer.position(queue) for queue in consumer.assignment()}
    waiting: dict[Queue, list[tuple[int, bytes]]] = {}
    for queue, begin in begins.items():
        world.check_position(consumer.group, queue, begin)
        found = [slot.found for slot in world.model.queues.get(queue, ())]
        waiting[queue] = [(each.number, each.body) for each in found if each.number >= begin]

    messages = consumer.poll(max_records=most)
    for queue, got in messages.items():
        if [(message.queue_offset, message.body) for message in got] != waiting[queue][: len(got)]:
            world.wrong(f"{queue}: from {begins[queue]} on, a consumer got {got}; there is {waiting[queue]}")
    count = sum(map(len, messages.values()))
    if count != min(most, sum(map(len, waiting.values()))):
        world.wrong(f"a consumer got {count} messages of {most} that it asked for; there are {waiting}")
    return [message for got in messages.values() for message in got]


def follow(world: World, at: int, chance: random.Random) -> None:
    """Let a consumer that stays open go on: it gets all that is new, of all queues, and nothing twice."""
    world.compare(world.session(chance), lives=True)
    waiting: dict[Queue, list[tuple[int, bytes]]] = {}
    for queue, slots in world.model.queues.items():
        begin = world.followed.get(queue, 0)
        if queue[0] in TOPICS and (new := [slot.found for slot in slots if slot.found.number >= begin]):
            waiting[queue] = [(each.number, each.body) for each in new]
    got = world.follow()
    if got is not None and got != waiting:
        world.wrong(f"a consumer that stays open got {got}; there is {waiting}")


def pipe(world: World, at: int, chance: random.Random) -> None:
    """Append what a consumer read as a batch that moves its group."""
    group, app, most = chance.choice(GROUPS), chance.choice(APPS), chance.choice([1, 3, 500])
    store = world.session(chance)
    world.compare(store, lives=True)
    version = world.next_version(app)
    if version is None:
        return
    with world.consumer(group) as consumer:
        messages = _poll(world, consumer, most)
        if not messages:
            return
        rows = [(_queue(chance), body_of(at, number), 0) for number in range(len(messages))]
        world.rows[app, version] = rows
        progress = consumer.positions()
        moves = tuple((group, queue, offset) for queue, offset in progress.offsets[group].items())
        effects = tuple(world.effect(*row) for row in rows)
        operation = Operation(f"pipe {app} {version} ({at}): {moves}", effects, batch=(app, version), moves=moves)
        request = BatchRequest(app_id=app, version=version, version_source="spark")

        def call() -> BatchResult:
            return store.append_batch(_parts(rows, chance), request, progress=progress)

        world.append(operation, call, flush=SYNC_FLUSH)
    world.compare(store, lives=True)


def expire(world: World, at: int, chance: random.Random) -> None:
    """Delete what has expired, in any way in which that can be asked for."""
    store = world.session(chance)
    world.compare(store, lives=True)
    size = store.writer.log.segment_size

    ways: dict[str, Any] = {}
    kind = chance.choice(["offset", "hours", "before", "at once", "by itself"])
    everything = {*GROUPS, SCHEDULE_TOPIC, HALF_TOPIC}

    if kind in ("offset", "at once"):
        ways["before_offset"] = world.model.begin + size * chance.choice([1, 2, 3, 10])
    if kind == "hours":
        ways["reserved_hours"] = chance.choice([0, 0, 1, 2])
    if kind == "before":
        ways["before_ms"] = max(0, world.wall_ms - chance.choice([0, 5000, HOUR_MS]))
    if kind == "at once":
        ways["at_once"] = True
        world.ignored |= everything
    elif chance.random() < 0.3:
        ways["ignored_groups"] = sorted(chance.sample(sorted(everything - {HALF_TOPIC}), chance.randint(1, 2)))
        world.ignored |= set(ways["ignored_groups"])

    world.note(f"retention: {ways or kind}")
    begin_before = world.model.begin
    slots = [slot.found for queue in world.model.queues.values() for slot in queue]

    with world.trying("retention"):
        if kind == "by itself":
            services = store._attached.services
            assert services is not None
            world.ignored -= everything
            services.retention.run_if_due()
            begin = None
        else:
            begin = store.delete_expired_files(**ways).min_offset

    world.compare(store, lives=True)
    if begin is not None and begin != world.model.begin:
        world.wrong(f"retention said that the log begins at {begin}, and it begins at {world.model.begin}")

    gone = [found for found in slots if begin_before <= found.place < world.model.begin]
    if "before_offset" in ways and world.model.begin > max(ways["before_offset"], begin_before):
        world.wrong(f"retention deleted up to {world.model.begin}, which is above {ways['before_offset']}")
    if "before_ms" in ways and any(found.store_ms >= ways["before_ms"] for found in gone):
        world.wrong(f"retention deleted messages that were stored at {ways['before_ms']} or later")
    if "reserved_hours" in ways and world.clock_never_jumped:
        latest_ms = world.wall_ms - ways["reserved_hours"] * HOUR_MS
        if any(found.store_ms > latest_ms for found in gone):
            world.wrong(f"retention deleted messages that are younger than {ways['reserved_hours']} hours")
    if kind == "by itself" and world.config.file_reserved_time < 0 and gone:
        world.wrong("retention deleted messages by itself, and fileReservedTime is -1")


# ---- sessions


def reopen(world: World, at: int, chance: random.Random) -> None:
    """Close the store, and open it with other settings, perhaps in another process."""
    world.close()
    world.open(chance.choice(world.actors), world.settings(chance))


def second_session(world: World, at: int, chance: random.Random) -> None:
    """Open a second session in the same process, with other settings, and close it again."""
    store, holder = world.session(chance), world.holder
    assert holder is not None
    other = world.settings(chance)
    world.note("a second session in the same process")
    try:
        with world.trying("a second session"), world.acting(holder):
            MessageStore.open(world.root, other, disk=world.disk).close()
    except ConfigError as error:
        world.note(f"  {error}")
    assert store is holder.session
    too_large(world, at, chance)  # its own settings count


def flush(world: World, at: int, chance: random.Random) -> None:
    store = world.session(chance)
    with world.trying("flush"):
        store.flush()
    world.note("flush")
    world.model.flush()


def alter_topic(world: World, at: int, chance: random.Random) -> None:
    """Give a topic more queues, or take write permission away for a moment."""
    store, topic = world.session(chance), chance.choice(TOPICS)
    with world.trying("alter topic"):
        if store.topic_config(topic) is None:
            store.create_topic(topic, chance.choice([2, 4]))
            return
        world.sealed.add(topic)
        store.alter_topic(topic, perm=4)

    refused = False
    try:
        with world.trying("put"):
            store.put_message(message_of((topic, 0), body_of(at, 0)))
    except (StoreLockedError, MessageIllegalError, ConfigError):
        refused = True
    if not refused:
        world.wrong(f"a put to {topic} was accepted, which nobody may write to")

    with world.trying("alter topic"):
        store.alter_topic(topic, perm=6, write_queue_nums=chance.choice([2, 4]))
    world.sealed.discard(topic)


def configure(world: World, at: int, chance: random.Random) -> None:
    """Change a setting that lives with the store, as `messagestore config set` does."""
    world.session(chance)
    holder = world.holder
    assert holder is not None
    key = chance.choice(list(STORED))
    values = {
        "flushDiskType": [SYNC_FLUSH, ASYNC_FLUSH],
        "maxMessageSize": ["1024", "1500"],
        "fileReservedTime": ["1", "-1"],
    }
    value = chance.choice([*values[key], None])
    world.storing = {name: each for name, each in {**world.stored, key: value}.items() if each is not None}
    world.note(f"config set {key}={value}")
    with world.trying("config set"), world.acting(holder):
        alter_stored_config(world.root, {key: value}, disk=world.disk)
    world.stored, world.storing = world.storing, None


def too_large(world: World, at: int, chance: random.Random) -> None:
    """Put a message that is larger than this session allows."""
    store, config = world.session(chance), world.config
    message = message_of(_queue(chance), body_of(at, 0, config.max_message_size))
    try:
        with world.trying("too large"):
            store.put_message(message)
    except MessageIllegalError:
        return
    world.wrong(f"a message of {len(message.body)} bytes was accepted; maxMessageSize is {config.max_message_size}")


# ---- reading


def read(world: World, at: int, chance: random.Random) -> None:
    """Read in every way that there is, in the session and beside it, and compare."""
    store = world.session(chance)
    world.compare(store, lives=True)
    with world.trying("read"):
        if world.reader is None:
            world.reader = MessageStore.open_read_only(world.root, world.config, disk=world.disk)
        for reader in (store, world.reader):
            world.check_reads(reader, chance)


# ---- faults


def dies(world: World, at: int, chance: random.Random) -> None:
    """The process dies now."""
    world.session(chance)
    world.note("the process is killed")
    raise Died("killed")


def dies_soon(world: World, at: int, chance: random.Random) -> None:
    """The process dies in a later operation of the disk."""
    world.disk.kill_at = world.disk.position + chance.choice([1, 3, 9, 25, 60, 150])
    world.disk.half_writes = chance.random() < 0.5
    world.note(f"it will be killed at operation {world.disk.kill_at - world.disk.position} from here")


def power_fails_soon(world: World, at: int, chance: random.Random) -> None:
    """The power fails in a later operation of the disk."""
    world.disk.kill_at = world.disk.position + chance.choice([1, 3, 9, 25, 60, 150])
    world.disk.half_writes = False
    world.cut = chance.choice(["strict", "all", "names only", "data only", "one file missing", "random", "random"])
    world.note(f"the power will fail at operation {world.disk.kill_at - world.disk.position} from here")


def fails_soon(world: World, at: int, chance: random.Random) -> None:
    """A later operation of the disk fails."""
    number = chance.choice([errno.EIO, errno.ENOSPC, errno.EMFILE, errno.EROFS])
    world.disk.error = (world.disk.position + chance.choice([0, 1, 3, 9, 25, 60]), number)
    world.note(f"operation {world.disk.error[0] - world.disk.position} from here will fail: {errno.errorcode[number]}")


def full(world: World, at: int, chance: random.Random) -> None:
    """The disk has no more room, or has room again."""
    world.disk.full = not world.disk.full
    world.note("the disk is full" if world.disk.full else "the disk has room again")


# ---- operators


def rebuild(world: World, at: int, chance: random.Random) -> None:
    """Remove the queues, or the index, and let the next writer make them again."""
    world.close()
    if world.ended != CLOSED or not world.disk.exists(f"{world.path}/consumequeue"):
        return
    what = chance.choice(["consumequeue", "index"])
    if world.model.deleted:
        what = "index"  # only the folder says that a topic was deleted: without it, the log brings the topic back
    if world.disk.exists(f"{world.path}/{what}"):
        for actor in world.actors:
            world.end(actor)
        world.note(f"rm -r {what}")
        world.disk.remove_tree(what)
        world.replace_disk(world.disk.content(), world.disk.times())
        world.drop_readers()
    world.open(chance.choice(world.actors), world.settings(chance))


def delete_topic(world: World, at: int, chance: random.Random) -> None:
    """Let a broker delete a topic, and create it again."""
    world.compare(world.session(chance), lives=True)
    world.close()
    topic = chance.choice(TOPICS)
    if world.ended == CLOSED and world.disk.exists(f"{world.path}/config/topics.json"):
        world.note(f"a broker deletes {topic}")
        world.delete_topic(topic)
        store = world.open(chance.choice(world.actors), world.settings(chance))
        with world.trying("create topic"):
            store.create_topic(topic, QUEUES)  # what is delivered or committed would make it with a single queue


def delete(world: World, at: int, chance: random.Random) -> None:
    """Delete a topic in a session, and create it again."""
    store, topic = world.session(chance), chance.choice(TOPICS)
    world.compare(store, lives=True)
    world.note(f"delete {topic}")
    world.deleting = topic
    with world.trying("delete topic"):
        try:
            store.delete_topic(topic)
        except UnknownTopicError:
            world.deleting = ""
            return
    world.deleting = ""
    world.model.delete(topic, forgotten=True)
    world.remade = True
    world.followed = {queue: number for queue, number in world.followed.items() if queue[0] != topic}
    world.missing.add(topic)
    with world.trying("create topic"):
        store.create_topic(topic, QUEUES)
    world.missing.discard(topic)


def back_up(world: World, at: int, chance: random.Random) -> None:
    """Copy the closed store."""
    world.session(chance)  # compares
    world.close()
    if world.ended == CLOSED and world.disk.exists(f"{world.path}/commitlog"):
        world.note(f"copy {len(world.copies)} is made")
        world.copies.append(
            Copy(
                world.disk.content(),
                world.disk.times(),
                copy.deepcopy(world.model),
                dict(world.rows),
                dict(world.half_ids),
                dict(world.stored),
                set(world.unsure),
            )
        )


def restore(world: World, at: int, chance: random.Random) -> None:
    """Put an older copy in the place of the store."""
    if not world.copies:
        return
    with world.trying("close"):
        world.close()
    for actor in world.actors:
        world.end(actor)
    number = chance.randrange(len(world.copies))
    old = world.copies[number]
    world.note(f"copy {number} is restored")
    world.restore(old)


ACTIONS: dict[Act, int] = {
    put: 14,
    puts: 5,
    put_async: 5,
    batch: 8,
    replay: 4,
    gap: 1,
    turn: 5,
    passes: 8,
    jumps: 2,
    deliver: 7,
    prepare: 4,
    finish: 4,
    check: 2,
    send_back: 3,
    publish: 3,
    consume: 3,
    follow: 3,
    pipe: 3,
    configure: 1,
    expire: 4,
    reopen: 5,
    second_session: 1,
    flush: 2,
    alter_topic: 1,
    too_large: 1,
    read: 3,
    dies: 3,
    dies_soon: 4,
    power_fails_soon: 4,
    fails_soon: 3,
    full: 1,
    rebuild: 1,
    delete_topic: 1,
    delete: 1,
    back_up: 1,
    restore: 1,
}
"""What may be done, and how often, in relation to the others."""
MEETINGS: tuple[tuple[Act, ...], ...] = (
    (put, puts, publish, expire, rebuild),
    (put, puts, prepare, expire, reopen),
    (put, prepare, finish, check, deliver, passes, send_back, expire, reopen),
    (put, batch, delete_topic, publish, deliver, passes, dies, reopen, replay, turn),
    (put, puts, consume, follow, pipe, publish, expire, delete, dies, dies_soon, reopen, turn),
    (put, batch, delete, consume, follow, prepare, finish, send_back, deliver, passes, power_fails_soon, reopen),
)
"""Actions that rarely meet among all others. Some histories consist of one of these groups."""
