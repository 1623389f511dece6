"""Where is a consumer group in its queues, and what comes next? A consumer, its messages, and its progress.

`consumer` hands messages out, `assignment` knows which queues the consumer has, and `progress` keeps how far the group
has come. This package may import everything but `messagestore.spi`.
"""
