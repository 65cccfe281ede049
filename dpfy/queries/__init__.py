"""Queries: a line of text, a public schema and a budget become claims, a run folder and answers."""
