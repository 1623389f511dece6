"""The race: what the store does, beside others that do the same, in one run (`make bench-peers`).

Sinks and sources of Spark: this project, Kafka (a real broker on loopback), Delta Lake, Parquet. Stores: this project,
RocketMQ's own `DefaultMessageStore`, SQLite and RocksDB. `contestants` lists them, with what each promises.

Contestants take turns within each round. The first round warms up, and does not count. Rows are made before the time
begins. What cannot be had (no Maven, no network) is listed under "Left out" in the result.
"""
