"""An HTTP server that lists name servers, as `rocketmq.namesrv.domain` names one."""

from __future__ import annotations

import http.server
import ssl
import threading
from typing import Self


class ListServer:
    """Listens on a free port, and answers each GET with `status` and `text`.

    Parameters
    ----------
    tls : ssl.SSLContext, optional
    """

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.status, self.text = 200, ""
        self.is_slow, self.claims = False, 0
        """Whether it says its text again and again, a byte at a time; how many bytes more it says that there are."""
        self.asked: list[str] = []
        self.was_asked = threading.Event()
        lists = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                lists.asked.append(self.path)
                self.send_response(lists.status)
                if lists.claims:
                    self.send_header("Content-Length", str(len(lists.text) + lists.claims))
                self.end_headers()
                while lists.is_slow:
                    self.wfile.write(lists.text[:1].encode())
                    lists.was_asked.wait(0.01)
                self.wfile.write(lists.text.encode())
                lists.was_asked.set()

            def log_message(self, *_: object) -> None:
                pass

        class Server(http.server.ThreadingHTTPServer):
            def handle_error(self, *_: object) -> None:
                """A client that went, or that refused the certificate."""

        self._server = Server(("127.0.0.1", 0), Handler)
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        scheme = "http" if tls is None else "https"
        self.url = f"{scheme}://127.0.0.1:{self._server.server_address[1]}/rocketmq/nsaddr"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def close(self) -> None:
        """Listen no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    def __exit__(self, *_: object) -> None:
        self.close()
