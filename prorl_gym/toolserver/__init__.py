"""The process inside the sandbox that executes the agent's actions.

It imports the standard library, ptyprocess and IPython only: nothing else of this package exists where it runs.
"""
