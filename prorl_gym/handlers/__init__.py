"""AgentHandler plugins: what a task family writes."""
