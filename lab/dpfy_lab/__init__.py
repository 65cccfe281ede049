"""The laboratory of dpfy: reproduced studies and seeded mistakes. dpfy finds it through entry
points and never imports it otherwise.
"""
