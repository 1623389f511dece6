"""Is this batch in the log, once? The rules, the plan and the append of a batch, and the files in which tasks stage it.

`append` has a batch written, by `writer.whole_batch`, if the rules accept it. This package may import
`messagestore.writer` and everything below it.
"""
