"""Local differential privacy: every report is randomised on the device that holds the value, so
that nobody else need be trusted.
"""
