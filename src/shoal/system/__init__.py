"""What a process takes from its machine: the time, randomness and threads.

This room may import nothing, and every other room may import it. No other room reads a clock, draws a random number or
starts a thread by itself, so that a simulation can replace all three. Start with `clock`.
"""
