"""Checks a whole store: every record, unit, index entry and small file, without changing a byte.

`verify.verify` is the only entry point; `report` holds the findings. This package may import `messagestore.recovery`
and everything below it.
"""
