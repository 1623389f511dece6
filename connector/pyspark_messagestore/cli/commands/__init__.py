"""The commands of `messagestore`, one file each. The program finds them by listing this folder.

A file has the name of its command. The thing in it that has this name is the command: a function, or a `typer.Typer`
whose commands are the words behind it. `PLACE` says where the command stands in `messagestore --help`: 100 to 199 show
what a store contains, 200 to 299 are about messages, 300 to 399 look after a store, and 400 to 499 are groups of
commands. `PANEL` names its group in that list. A command imports what commands share (`app`, `output`, `cursor`), and
no other command.
"""
