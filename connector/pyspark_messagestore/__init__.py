"""The package that a Spark driver and its workers import first. The import does no heavy work and cannot fail.

Spark imports every installed package whose name starts with ``pyspark_`` when a session starts, in each of its
processes. A slow import would delay jobs that never use the store, and an error would be reported far from its cause.
So the data source is imported when it is first used. The store itself is in the package ``messagestore``; the command
line is in ``pyspark_messagestore.cli``.

``DefaultSource`` is the name that Spark's discovery looks for. It imports ``MessageStoreDataSource`` when a query uses
the format, and says what is missing if it cannot. ``MessageStoreSink`` is for ``foreachBatch``, and
``MessageStoreListener`` says how far queries are behind.
"""

__version__ = "0.1.0.dev0"

__all__ = [
    "DefaultSource",
    "MessageStoreDataSource",
    "MessageStoreListener",
    "MessageStoreSink",
    "__version__",
]  # provided by __getattr__

_HOMES = {
    "MessageStoreDataSource": "datasource",
    "MessageStoreListener": "monitoring.listener",
    "MessageStoreSink": "sink.writers",
}


def __getattr__(name: str) -> object:
    """The classes of `__all__`, which are imported when they are first used.

    Raises
    ------
    AttributeError
        There is no such name, or it is `DefaultSource`, and this Python has no PySpark that looks for it. An error of
        another kind would hide the data sources of all packages from Spark.
    ImportError
        Another of the classes cannot be imported; the error says what is missing.
    """
    import importlib

    if name == "DefaultSource":
        try:
            return importlib.import_module(f"{__name__}.discovery").DiscoveredSource
        except ImportError as error:
            raise AttributeError(f"{__name__}.{name} needs PySpark: {error}") from error
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"{__name__}.{home}"), name)
    except Exception:  # noqa: BLE001 # a package that is broken may raise anything
        from pyspark_messagestore.requirements import missing

        raise ImportError(missing()) from None
