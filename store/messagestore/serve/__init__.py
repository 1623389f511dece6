"""Serves a store of this host to other hosts, over HTTP.

`hosted` carries out the verbs of the seam on the store. `limits` bounds what clients together can take. `exchange` is
one request and its answer, `service` decides what a request may do and calls the verb, and `server` owns the
connections. `lifecycle` starts and ends all of it around one store. `store/PROTOCOL.md` describes the messages.
"""
