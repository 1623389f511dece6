"""Appends, syncs and publishes: the one writer of a store, its threads and its states.

`log_writer` appends a record and makes it visible, `whole_batch` does so for a batch. This package may import
`messagestore.log` and everything below it, and nothing of `messagestore.read`.
"""
