"""Bytes in memory: messages, records and settings, and how they become bytes and back.

Layouts, codecs, checks and configuration live here. Only settings files are opened here.
This package may import `messagestore.errors`, numpy, pyarrow and the checksum libraries.
All other packages of the store build on it.
"""
