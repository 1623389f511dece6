"""The data source that Spark finds if the real one cannot be imported. It raises one sentence that says why.

Spark finds data sources by importing every package named ``pyspark_*`` and looking for ``DefaultSource``. On a PySpark
that is too old, or in an environment that lacks a package, importing the real one fails. Without this class Spark would
then report DATA_SOURCE_NOT_FOUND, which names neither the cause nor the remedy.
"""

from __future__ import annotations

import os

from pyspark.sql.datasource import DataSource

from pyspark_messagestore.requirements import missing


class UnavailableSource(DataSource):
    """Stands in for `MessageStoreDataSource`. No instance of it can be created.

    Raises
    ------
    ImportError
        Always; the error says what is missing and what to do.
    """

    def __init__(self, options: object) -> None:  # noqa: ARG002 # Spark passes them by name
        # By default, Spark adds the traceback to the error. The variable turns that off; this process ends anyway.
        os.environ["SPARK_HIDE_TRACEBACK"] = "1"
        raise ImportError(missing())

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return "messagestore"
