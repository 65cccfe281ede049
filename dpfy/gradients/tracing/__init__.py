"""Tracing: what a step did, from the dispatcher: recorded programs and mixing of examples."""
