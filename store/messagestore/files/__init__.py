"""The files of a store, one module for each kind of file, and the disk they are on.

`mapped_file.Disk` is the one place that makes system calls on files; tests put another disk in its place.
A module here knows its own file and no other: relations between files are in `messagestore.log`.
It may import `messagestore.format` and `messagestore.errors`.
"""
