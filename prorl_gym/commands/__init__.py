"""What the command line can do, one command per module."""
