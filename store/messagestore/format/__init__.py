"""Bytes in memory: what a message, a record and a setting are, and how they become bytes and back.

Layouts, codecs, checks and configuration live here. Nothing here opens a file.
It may import `messagestore.errors`, numpy, pyarrow and the checksum libraries.
Everything else in the store stands on it.
"""
