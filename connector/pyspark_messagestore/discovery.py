"""What Spark's discovery finds: a class that imports the data source when a query uses it.

Spark finds data sources by importing every package named ``pyspark_*`` and looking for ``DefaultSource``. A process of
its own does so before the first query of a session that reads or writes through Python, whether or not the query uses
the store. The data source with numpy, Arrow and the store would more than double what that process imports.

On a PySpark that is too old, or in an environment that lacks a package, importing the data source fails. If discovery
failed there, Spark would report DATA_SOURCE_NOT_FOUND, which names neither the cause nor the remedy.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

from pyspark_messagestore.requirements import missing

if TYPE_CHECKING:
    from pyspark_messagestore.datasource import MessageStoreDataSource


class DiscoveredSource(DataSource):
    """Makes a `MessageStoreDataSource`. There are no instances of this class itself.

    Raises
    ------
    ImportError
        The data source cannot be imported; the error says what is missing and what to do.
    """

    def __new__(cls, options: MutableMapping[str, str]) -> MessageStoreDataSource:  # type: ignore[misc]
        """The data source itself, with the user's options."""
        try:
            from pyspark_messagestore.datasource import MessageStoreDataSource
        except Exception:  # noqa: BLE001 # a package that is broken may raise anything
            # By default, Spark adds the traceback to the error. The variable turns that off; this process ends anyway.
            os.environ["SPARK_HIDE_TRACEBACK"] = "1"
            raise ImportError(missing()) from None
        return MessageStoreDataSource(options)

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return "messagestore"
