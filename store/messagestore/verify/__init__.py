"""The check of a whole store: every record, unit, index entry and small file, without changing a byte.

`verify.verify` is the only entry; `report` holds what it finds. This package may import `messagestore.recovery` and
everything below it.
"""
