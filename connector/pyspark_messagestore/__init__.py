"""What a Spark driver and its workers import first: nothing heavy happens here, and nothing here can raise.

Spark imports every installed package whose name starts with ``pyspark_`` when a session starts, in each of its
processes. A slow import would be paid by jobs that never use the store, and an error would be reported far from its
cause. So the data source is imported when it is first asked for. The store itself is in the package ``messagestore``;
the command line is in ``pyspark_messagestore.cli``.

``DefaultSource`` is what Spark's discovery looks for; it is ``MessageStoreDataSource``. ``MessageStoreSink`` is for
``foreachBatch``.
"""

__version__ = "0.1.0.dev0"

__all__ = ["DefaultSource", "MessageStoreDataSource", "MessageStoreSink", "__version__"]  # given by __getattr__

_HOMES = {"DefaultSource": "datasource", "MessageStoreDataSource": "datasource", "MessageStoreSink": "sink"}


def __getattr__(name: str) -> object:
    """The classes of `__all__`, imported when they are first asked for."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    try:
        return getattr(importlib.import_module(f"{__name__}.{home}"), name)
    except ImportError as error:  # one package that raises here would hide everybody's data sources from Spark
        raise AttributeError(f"{__name__}.{name} needs a package that is not there: {error}") from error
