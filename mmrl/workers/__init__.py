"""The one supervisor of child processes, under rewards, media, requests, simulators, verifiers and policies of other interpreters.

process    Child: a process that may hang, die or lie; its deadline, its end, how it ended, restarts against a limit
spawned    Worker: a spawned Python that runs a function of ours; messages are objects, through a pipe
program    Program: a command; messages are bytes, through its stdin and stdout
"""
