"""Where is a consumer group in its queues, and what comes next? A consumer, its messages, and its progress.

`consumer` reads the queues and hands messages out; `progress` keeps how far the group has come. This package may import
everything but `messagestore.spi`.
"""
