"""Callbacks: what happens on the host between steps."""

from trainer.callbacks.evaluate import Evaluate as Evaluate
from trainer.callbacks.progress import Progress as Progress
