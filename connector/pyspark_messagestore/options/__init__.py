"""What a user can ask for: the options of source and sink as tables, and how their values are read."""
