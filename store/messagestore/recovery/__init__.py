"""Recovery of a store that was not closed: where its log ends, what is cut off, and what is rebuilt.

`recover.recover` is the only entry point. It decides where the log ends, and makes queues, index and journal agree with
it. This package may import `messagestore.writer`, `messagestore.log` and everything below them.
"""
