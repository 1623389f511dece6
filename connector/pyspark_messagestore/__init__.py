"""What a Spark driver and its workers import first: nothing heavy happens here, and nothing here can raise.

Spark imports every installed package whose name starts with ``pyspark_`` when a session starts, in each of its
processes. A slow import would be paid by jobs that never use the store, and an error would be reported far from its
cause. The store itself is in the package ``messagestore``; the command line is in ``pyspark_messagestore.cli``.
"""

__version__ = "0.1.0.dev0"

__all__ = ["__version__"]
