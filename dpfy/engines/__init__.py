"""Bounded aggregates of private tables: what families ask, and the engines that answer.

A family describes what each row adds as an expression over its cells. The reference evaluates it
with numpy, DuckDB and Spark as SQL; all of them return the same whole numbers.
"""
