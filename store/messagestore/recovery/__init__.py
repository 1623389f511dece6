"""What happens to a store that was not closed: where its log ends, what is cut, and what is made again.

`recover.recover` is the one entry. It decides the log's end and brings queues, index and journal in line with it.
It may import `messagestore.write`, `messagestore.log` and what is below them.
"""
