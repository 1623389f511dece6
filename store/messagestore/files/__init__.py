"""The files of a store, one module for each kind of file, and the disk they are on.

`disk.Disk` is the only place that makes system calls on files; tests replace it with other disks. Each module
knows its own file and no other; relations between files are in `messagestore.log`. This package may import
`messagestore.format` and `messagestore.errors`.
"""
