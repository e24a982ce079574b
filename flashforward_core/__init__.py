"""FlashForward: long video from few-step autoregressive diffusion, as a graph of tasks.

Importing this package imports neither torch nor any other third-party module.
"""

__version__ = "0.1.0"
