"""Everything that adds to the log: the writer, Spark's transactions, staging and flushing.

A batch becomes visible in `log_writer` and is made known as Spark's batch in `transaction`.
It may import `messagestore.log` and what is below it, and nothing of `messagestore.read`.
"""
