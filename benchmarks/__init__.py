"""How fast is the store, and how far from what the machine allows?

    python -m benchmarks store [--quick] [--rows N] [--only append read put open syncs recovery] [--folder DIR]

Every figure is taken in rounds, its floors in the same rounds, and is a median; see `measure` for what is printed.
"""
