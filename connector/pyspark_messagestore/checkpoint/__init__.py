"""A query's checkpoint, without Spark: shown, checked and copied."""
