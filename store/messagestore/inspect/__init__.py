"""What an operator wants to know: the check of a whole store, what it contains, and what the host offers.

Nothing here takes a lock or changes a byte. `verify` checks every byte, `operator` says what the store contains and how
it was left, `host` says what the machine offers. This package may import `messagestore.recovery`,
`messagestore.broker` and everything below them.
"""
