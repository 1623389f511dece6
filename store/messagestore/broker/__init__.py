"""What a broker does besides storing: delayed messages, half messages, retries and retention.

This package may import `messagestore.batches`, `messagestore.read` and everything below them.
"""
