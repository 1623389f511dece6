"""Random histories of a fake Spark: kills, failures, replays, restarts, zombies, second drivers, tampered checkpoints.

One number decides everything that happens in a history. Every row that a query took must be in the store once, and in
order per queue. What ends with an error must end with the right one, and must continue when its cause is removed.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Collection
from pathlib import Path

from messagestore import (
    BatchConflictError,
    MessageStore,
    OffsetOutOfRangeError,
    QueryConflictError,
    StoreError,
    VersionRegressionError,
)
from messagestore.files.staging_files import sweep
from messagestore.inspect.verify import verify
from spark_faults.fake_spark import Checkpoint, Driver, Job, QueryFailedError
from spark_faults.ledger import check, raw_bodies, visible
from spark_faults.processes import WAIT_S, Killed, Process, site_of
from spark_faults.world import QUEUES, TURNS, Query, World


class History(World):
    """One history, in which a number decides what happens."""

    action_count = 0
    kinds: Collection[str] | None = None
    """Names of the actions that may be drawn; None: all of them."""

    def run(self, only: Collection[int] | None = None) -> None:
        """Run all `action_count` actions, or those whose numbers are in `only`, and the checks.

        Each action has its own source of randomness, so it is the same without the others.

        Raises
        ------
        AssertionError
            A row is lost, duplicated or out of order, or an error was the wrong one.
        """
        actions: list[tuple[int, Callable[[], None]]] = [
            (8, self.go_on),
            (3, self.append),
            (1, self.new_query),
            (3, self.zombie),
            (3, self.two_drivers),
            (2, self.two_queries),
            (1, self.copied_checkpoint),
            (2, self.forget_commits),
            (2, self.roll_back),
            (1, self.delete_checkpoint),
            (3, self.batch_job),
            (2, self.retention),
            (1, self.detach),
            (2, self.unmounted),
            (2, self.older_backup),
            (2, self.first_batch_again),
            (2, self.second_topic),
            (2, self.taken_over),
        ]
        actions = [action for action in actions if self.kinds is None or action[1].__name__ in self.kinds]

        weights, calls = zip(*actions, strict=True)
        try:
            with self.process("setup").running(), MessageStore.open(self.input, self.config) as store:
                store.create_topic("in", QUEUES)
            self.append()
            self.new_query()

            self.action_count = self.rng.choices((1, 2, 3, 4), (3, 4, 2, 1))[0]
            for number in range(self.action_count) if only is None else only:
                self.rng.seed(f"{self.seed} {number}")
                action = self.rng.choices(calls, weights)[0]
                self.tally["action " + action.__name__.replace("_", " ")] += 1
                self.note(f"action {action.__name__}")
                action()

            self.note("finish")
            self.rng.seed(f"{self.seed} end")
            self.finish()
        finally:
            for process in self.processes:
                process.die()

    # ---- actions

    def go_on(self) -> None:
        """Run a query with faults; its driver may be killed between any two calls."""
        query = self.any_query()
        driver = self.driver(query)
        self.draw_fault(driver)
        places = driver.batches()
        self.drive(query, driver, places, kill=self.rng.choice((0.0, 0.08)))
        self.doom.clear()
        driver.die()

    def zombie(self) -> None:
        """Kill JVM and daemon while a commit sleeps; a new driver commits; then the sleeper wakes up."""
        query = self.any_query()
        driver = self.driver(query)
        if self.drive(query, driver, driver.batches(), stop="commit") != "commit":
            return

        attempt, process = driver.attempt, driver.commit_process or Process()
        assert attempt is not None
        self.processes.append(process)
        process.disk.stop_at = len(process.disk.operations) + self.rng.randrange(30)
        self.ledger.attempted(attempt)

        errors: list[BaseException] = []
        thread = threading.Thread(target=_commit, args=(driver, process, attempt.version, errors))
        thread.start()
        while thread.is_alive() and not process.disk.stopped.wait(0.0005):
            pass
        self.asleep = process.disk.stopped.is_set()
        self.tally["a commit sleeps"] += self.asleep

        driver.die(zombie=True)
        for _ in range(2):
            after = self.driver(query)
            self.drive(query, after, after.batches())

        process.disk.go_on.set()
        thread.join(WAIT_S)
        assert not thread.is_alive(), "a commit never ends"
        self.asleep = False

        process.die()
        for error in errors:
            self.tally[f"a sleeper ended with {type(error).__name__}"] += 1
            assert isinstance(error, StoreError), repr(error)

    def two_drivers(self) -> None:
        """Run two drivers on one checkpoint, in turns."""
        query = self.any_query()
        self.in_turns([query, query])

    def two_queries(self) -> None:
        """Run two queries into one topic, in turns; a commit of one may be killed."""
        if len([query for query in self.queries if not query.done_for]) < 2:
            self.new_query()
        running = self.rng.sample([query for query in self.queries if not query.done_for], 2)
        if self.rng.random() < 0.5:
            self.doom["commit"] = {"kill_at": self.rng.randrange(40), "half": self.rng.random() < 0.5}
        self.in_turns(running)
        self.doom.clear()

    def first_batch_again(self) -> None:
        """Start a query that begins where the input ends, while rows come; kill its drivers before commits/0 is written.

        When the batch is planned, the options may ask for a place that does not exist: the batch has its own.
        """
        self.new_query()
        query = self.queries[-1]
        query.source["startingOffsets"] = "latest"

        for _ in range(self.rng.randint(1, 3)):
            driver = self.driver(query)
            stop = self.rng.choice(("offsets", "planned", "task", "commit", "returned"))
            places = driver.batches()

            place = self.step(query, driver, places)
            if place == "started":
                self.append()
            while place not in (stop, "commits", "idle", "failed"):
                place = self.step(query, driver, places)

            self.tally["first batches killed"] += place == stop
            driver.die()
            self.append()
            if place != stop:
                break

            if query.checkpoint.offsets and self.rng.random() < 0.5:
                query.source["startingOffsets"] = f'{{"in": {{"{QUEUES}": 0}}}}'
                self.tally["first batches whose place is gone"] += 1
        else:
            self.run_to_end(query)
        query.source["startingOffsets"] = "latest"

    def copied_checkpoint(self) -> None:
        """Copy the checkpoint and use both: sooner or later one of the two queries has to give up."""
        query = self.any_query()
        twin = Query(query.label, query.checkpoint.copy(), dict(query.source), dict(query.sink))
        twin.not_before = query.not_before
        twin.foreach = query.foreach
        twin.tampered = query.tampered = twin.copied = query.copied = True
        self.queries.append(twin)
        self.in_turns([query, twin])
        self.append()

    def in_turns(self, queries: list[Query]) -> None:
        """Run drivers at the same time until all have ended."""
        drivers = [self.driver(query) for query in queries]
        alive = [(query, driver, driver.batches()) for query, driver in zip(queries, drivers, strict=True)]
        for _ in range(TURNS):
            if not alive:
                return
            one = self.rng.choice(alive)
            if self.step(*one) in ("idle", "failed"):
                alive.remove(one)
        raise AssertionError("two drivers never end")

    def forget_commits(self) -> None:
        """Delete the last commits/N: these batches are written again, in other partitions."""
        query = self.any_query()
        for number in sorted(query.checkpoint.commits)[-self.rng.randint(1, 2) :]:
            query.checkpoint.commits.discard(number)
        last = query.checkpoint.last
        if last is not None:  # Spark looks only at the last batch
            query.checkpoint.offsets = {n: o for n, o in query.checkpoint.offsets.items() if n <= last}
        self.go_on()

    def roll_back(self) -> None:
        """Restore an earlier checkpoint, some batches back; a backup of the newer one is kept."""
        query = self.any_query()
        query.backups.append(query.checkpoint.copy())
        query.checkpoint.roll_back(self.rng.randint(1, 3))
        query.tampered = True
        if self.rng.random() < 0.5:
            self.append()
        self.go_on()

    def delete_checkpoint(self) -> None:
        """Use a new checkpoint.

        With a new name, all rows come again; under a known app id, they are known or a conflict.
        """
        query = self.any_query()
        if "txnAppId" in query.sink:
            query.backups.append(query.checkpoint)
            query.checkpoint = Checkpoint(self.identifier())
            query.tampered = True
        else:
            query.done_for = query.replaced = True
            self.new_query()
        self.go_on()

    def batch_job(self) -> None:
        """Run a batch job until it succeeds; then the same version with other rows, and an older version."""
        rng = self.rng
        number = sum(label.startswith("j") for label in self.labels.values())

        label, version = f"j{number}/", rng.randrange(3)
        rows = [f"{rng.randrange(QUEUES)}/{i}".encode() for i in range(rng.randint(1, 30))]
        sink = {"path": self.out, "topic": "out", "storeConfig": self.settings, "lockTimeout": "20ms"}
        if rng.random() < 0.8:
            sink |= {"txnAppId": f"job-{number}", "txnVersion": str(version)}
        query = Query(label, Checkpoint(""), {}, sink)

        for _ in range(TURNS):
            job = self.job(query, rows)
            if rng.random() < 0.6:
                self.draw_fault(job)
            places = job.batches()
            self.drive(query, job, places, kill=rng.choice((0.0, 0.1)))
            self.doom.clear()
            job.die()
            if job.checkpoint.commits or "txnAppId" not in sink:
                break

        if "txnAppId" in sink:
            self._refused(query, [*rows, b"0/99"], version, BatchConflictError)
            if version:
                self._refused(query, rows, version - 1, VersionRegressionError)

    def job(self, query: Query, rows: list[bytes]) -> Job:
        """Create the batch job with these rows, in any number of partitions."""
        cut = self.rng.randint(0, len(rows))
        job = Job([rows[:cut], rows[cut:]], dict(query.sink), query.label, self.process)
        job.on_commit = self.ledger.attempted
        self.labels[job.app] = query.label
        return job

    def _refused(self, query: Query, rows: list[bytes], version: int, kind: type[StoreError]) -> None:
        query.sink["txnVersion"] = str(version)
        job = self.job(query, rows)
        try:
            for _ in job.batches():
                pass
        except QueryFailedError as error:
            assert isinstance(error.__cause__, kind), repr(error.__cause__)
        else:
            raise AssertionError(f"{query.label} version {version} was accepted")
        job.die()
        self.tally[f"refused with {kind.__name__}"] += 1

    def retention(self) -> None:
        """Delete the oldest segment of the input, even if somebody has not read it yet."""
        if self.input == self.out:
            return
        self.go_on()
        for _ in range(4):
            self.append(fat=True)
        before = self.look_at_input()
        segments = sorted((Path(self.input) / "commitlog").iterdir())
        if len(segments) < 2:
            return
        segments[0].unlink()
        self.gone |= before - self.look_at_input()
        self.tally["rows removed by retention"] += len(self.gone)
        for query in self.queries:
            query.tampered = True

    # ---- the store is missing, or is another one

    def aside(self) -> Query | None:
        """Return a query whose store may be taken away.

        The query has written, does not read from the store, and nobody uses the store.
        """
        if self.input == self.out:
            return None
        self.run_out()
        for process in self.processes:
            process.die()
        self.append()
        alive = [q for q in self.queries if not q.done_for and self.ledger.last(q.app, q.checkpoint.query_id) >= 0]
        return self.rng.choice(alive) if alive else None

    def run_out(self) -> None:
        """Run a query without faults until nothing is new."""
        self.run_to_end(self.any_query())

    def run_to_end(self, query: Query) -> None:
        """Run this query without faults until nothing is new."""
        driver = self.driver(query)
        self.drive(query, driver, driver.batches())
        driver.die()

    def unmounted(self) -> None:
        """Unmount the disk: the folder is empty or missing, and stays so."""
        query = self.aside()
        if query is None:
            return

        out, away = Path(self.out), Path(self.out + "-away")
        out.rename(away)
        exists = self.rng.random() < 0.5
        if exists:
            out.mkdir()

        version = _next(query.checkpoint)
        self.elsewhere = True
        driver = self.driver(query)
        driver.sink_options["onLostBatches"] = self.rng.choice(("fail", "continue"))
        if version:
            assert self.drive(query, driver, driver.batches()) in ("failed", "idle")
            assert out.exists() is exists, "a refused batch made the folder"
            assert not exists or not list(out.iterdir()), f"a refused batch left {list(out.iterdir())}"
            self.tally["queries without their store"] += 1

        driver.die()
        for process in self.processes:
            process.die()

        self.elsewhere = False
        if exists:
            out.rmdir()
        away.rename(out)
        self.go_on()

    def older_backup(self) -> None:
        """Restore a backup under a query that has continued.

        Its next batch is refused; then the newer store comes back.
        """
        query = self.aside()
        if query is None:
            return

        out, away = Path(self.out), Path(self.out + "-away")
        shutil.copytree(out, self.out + "-backup")

        before = self.ledger.last(query.app, query.checkpoint.query_id)
        driver = self.driver(query)
        self.drive(query, driver, driver.batches())
        driver.die()
        for process in self.processes:
            process.die()

        self.append()
        out.rename(away)
        Path(self.out + "-backup").rename(out)

        if not query.done_for and not query.tampered and _next(query.checkpoint) > before + 1:
            self.elsewhere = True
            driver = self.driver(query)
            assert self.drive(query, driver, driver.batches()) in ("failed", "idle")
            driver.die()
            self.tally["queries over an older backup"] += 1
        for process in self.processes:
            process.die()

        self.elsewhere = False
        shutil.rmtree(out)
        away.rename(out)

    def second_topic(self) -> None:
        """Use a second sink under the same app id: the last batch comes again, for another topic."""
        self.append()
        self.run_out()

        written = [
            query
            for query in self.queries
            if "txnAppId" in query.sink and not query.done_for and query.checkpoint.last in query.checkpoint.commits
        ]
        if not written or self.gone:
            return

        query = self.rng.choice(written)
        twin = Query(query.label, query.checkpoint.copy(), dict(query.source), {**query.sink, "topic": "audit"})
        twin.foreach = query.foreach
        assert twin.checkpoint.last is not None
        twin.checkpoint.commits.discard(twin.checkpoint.last)

        driver = self.driver(twin)
        driver.on_commit = lambda _: None
        try:
            for place in driver.batches():
                if place == "returned":
                    break
        except QueryFailedError as error:
            text = str(error.__cause__)
            refused = isinstance(error.__cause__, BatchConflictError) and "rows for topic audit" in text
            assert refused or query.tampered or query.copied, repr(error.__cause__)
            self.tally["second topics refused"] += refused
        else:
            assert driver.attempt is None or not driver.attempt.rows, f"{driver.attempt}: passed for a replay"

        driver.die()

    def taken_over(self) -> None:
        """Run another query with the same app id.

        It is refused, or it takes the app over and the old one is refused permanently.
        """
        self.run_out()
        known = [q for q in self.queries if "txnAppId" in q.sink and not q.done_for and not q.copied and not q.tampered]
        known = [query for query in known if self.ledger.last(query.app, query.checkpoint.query_id) >= 0]
        if not known:
            return

        old = self.rng.choice(known)
        new = Query(f"n{len(self.queries)}/", Checkpoint(self.identifier()), dict(old.source), dict(old.sink))
        new.source["startingOffsets"], new.foreach = "earliest", old.foreach

        self.append()
        self._other_query(new, {})
        self.queries.append(new)
        old.done_for = old.replaced = True
        new.sink["onNewQuery"] = "continue"

        for _ in range(TURNS):
            driver = self.driver(new)
            self.draw_fault(driver)
            end = self.drive(new, driver, driver.batches(), kill=self.rng.choice((0.0, 0.1)))
            self.doom.clear()
            driver.die()
            if end == "idle":
                break

        del new.sink["onNewQuery"]
        if self.ledger.owners[new.app] == new.checkpoint.query_id:
            self.tally["apps taken over"] += 1
            self._other_query(old, {"onNewQuery": self.rng.choice(("fail", "continue"))})

    def _other_query(self, query: Query, options: dict[str, str]) -> None:
        """Run a query that has no right to its app id: nothing that it brings is accepted."""
        self.append()
        driver = Driver(query.checkpoint, query.source, {**query.sink, **options}, query.label, self.process)
        driver.foreach = query.foreach
        try:
            for place in driver.batches():
                assert place not in ("returned", "commits"), f"{driver.attempt}: a query without the app was let in"
        except QueryFailedError as error:
            if isinstance(error.__cause__, QueryConflictError):
                self.tally["refused with QueryConflictError"] += 1
            else:
                assert isinstance(error.__cause__, OffsetOutOfRangeError), repr(error.__cause__)
        driver.die()

    def detach(self) -> None:
        """Let all living processes be idle for a while; a kill may come in between."""
        for process in self.processes:
            if not process.disk.dead:
                if self.rng.random() < 0.3:
                    process.disk.kill_at = len(process.disk.operations) + self.rng.randrange(8)
                try:
                    process.idle()
                except Killed:
                    self.tally["killed while detaching"] += 1

    # ---- the end

    def finish(self) -> None:
        """Run all queries to their end without faults, then count everything."""
        self.finishing = True
        for process in self.processes:
            if process.disk.killed_in is not None and process.disk.killed_in.name != "kill":
                self.tally[f"killed at {site_of(process.disk.killed_in)}"] += 1
            process.die()
        for root in {self.input, self.out}:
            with Process().running(), MessageStore.open(root, self.config):
                pass  # what a killed writer left incomplete is visible only after the next one has recovered
        for _ in range(TURNS):
            self.doom.clear()
            ends = []
            for query in [query for query in self.queries if not query.done_for]:
                driver = self.driver(query)
                ends.append(self.drive(query, driver, driver.batches()))
            if "failed" not in ends:
                break
        else:
            raise AssertionError("a query fails for ever")
        for process in self.processes:
            process.die()
        with Process().running(), MessageStore.open(self.out, self.config):
            pass
        queues = visible(self.out, "out")
        assert {q: b for q, b in raw_bodies(self.out, "out").items() if b} == {q: b for q, b in queues.items() if b}
        check(queues, self.ledger, self.labels)
        self.check_complete({body for bodies in queues.values() for body in bodies})
        staging = Path(self.out, "spark", "staging")
        sweep(str(staging), -1)
        assert list(staging.iterdir()) == []
        if self.rng.random() < 0.1:
            report = verify(Path(self.out))
            assert report.ok, report.findings[:3]
        self.tally["rows"] += sum(map(len, queues.values()))

    def check_complete(self, there: set[bytes]) -> None:
        """Check that each query that continues has delivered all its rows, and that one of each name continues."""
        self.look_at_input()
        for label in {query.label for query in self.queries}:
            alive = [query for query in self.queries if query.label == label and not query.done_for]
            replaced = any(query.replaced for query in self.queries if query.label == label)
            assert alive or replaced, f"{label}: nobody goes on"
            for query in alive:
                for body, offset in self.seen.items():
                    if label.encode() + body in there or body in self.gone:
                        continue
                    skipped = query.source["startingOffsets"] == "latest" and query.not_before is not None
                    first = query.not_before.get(int(body.split(b"/")[0]), 0) if skipped else 0
                    assert offset < first, f"{label}: lost {body!r}, offset {offset}"


def _next(checkpoint: Checkpoint) -> int:
    """Return the number of the next batch."""
    if checkpoint.last is None:
        return 0
    return checkpoint.last + (checkpoint.last in checkpoint.commits)


def _commit(driver: Driver, process: Process, version: int, errors: list[BaseException]) -> None:
    try:
        driver.commit_in(process, version)
    except BaseException as error:  # noqa: BLE001 # whatever it is, it is looked at
        errors.append(error)
