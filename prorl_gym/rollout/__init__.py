"""Episodes: one agent and one environment to the end, through the one multi-turn loop."""
