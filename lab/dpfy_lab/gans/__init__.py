"""Networks that make rows: a generator against a discriminator that was trained with noise (DP-GAN)
or by noisy votes (PATE-GAN).
"""
