"""The command line: options, files and printing. Alone may import the agent, and nothing imports it."""
