"""Everything that adds to the log: the writer, Spark's transactions, staging and flushing.

`log_writer` makes a batch visible, and `transaction` appends it as Spark's batch. This package may import
`messagestore.log` and everything below it, and nothing of `messagestore.read`.
"""
