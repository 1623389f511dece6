"""Reading: from the options of a query to Spark's rows."""
