"""Private evolution: samples of a public generator, chosen by noisy votes of private records (Lin
et al. 2024).
"""
