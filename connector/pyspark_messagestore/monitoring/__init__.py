"""How a store and its queries are doing, for programs: Prometheus figures and a listener."""
