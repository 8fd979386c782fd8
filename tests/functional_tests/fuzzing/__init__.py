"""Mutated inputs for the commands, each run in a forked process under limits."""
