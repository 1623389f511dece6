"""Writing: from a DataFrame's columns to a committed batch."""
