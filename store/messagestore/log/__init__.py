"""Relates the files of a store to one another: the log, queue units, index entries, batches and the journal.

`store_files.StoreFiles` holds a store's open files; `dispatch` turns records into units and index entries.
Reading, writing, recovery and verification all use this package. It may import `messagestore.files`,
`messagestore.format` and `messagestore.errors`.
"""
