"""The check of a whole store: every record, unit, index entry and small file, without changing a byte.

`verify.verify` is the one entry; `report` holds what it finds.
It may import `messagestore.recovery` and everything below it.
"""
