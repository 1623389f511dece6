"""The command line `messagestore`. To add a command, add a file to `commands`."""
