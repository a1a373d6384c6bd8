"""Inference endpoints, routing and policy versions."""
