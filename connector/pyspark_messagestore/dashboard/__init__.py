"""The dashboard: pages that answer questions about stores on this host, as an ASGI application. It reads only.

    application   the addresses, and what becomes of a request
    guard         who may ask, and how much at once
    reads         how many bytes a second
    looks         what each page says, as values for JSON
    kept          what was found, until the store changes
    curves        numbers as a picture

It needs neither Spark nor Java, takes no lock and works beside a live broker. `app` makes the application, which
`messagestore dashboard` serves; any ASGI server can, behind a login of one's own.
"""

from pyspark_messagestore.dashboard.application import app

__all__ = ["app"]
