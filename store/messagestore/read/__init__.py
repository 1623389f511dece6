"""Everything that reads a store besides its writer: views, queries, ends of queues, and what a tail proves.

Readers take no lock and change no byte. This package may import `messagestore.log` and everything below it, and nothing
of `messagestore.writer`.
"""
