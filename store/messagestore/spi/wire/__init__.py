"""What client and server of a store send each other: bytes and values in memory, and no connection.

`store/PROTOCOL.md` describes every message. Values and errors are JSON with tags from fixed tables (`values`,
`failures`). `frames` puts raw buffers behind a JSON head, and `parts` puts rows and gathered records into frames. What
arrives may come from anybody: each module here refuses what it does not know, and nothing is ever unpickled.
"""
