"""Decisions and nothing else: no clock, dice, sockets, threads, logs or environment."""
