"""Everything that reads a store beside its writer: views, queries, ends of queues, and what a tail proves.

Readers take no lock and change no byte.
It may import `messagestore.log` and what is below it, and nothing of `messagestore.write`.
"""
