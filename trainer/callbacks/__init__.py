"""Callbacks: what happens on the host between steps."""

from trainer.callbacks.evaluate import Evaluate as Evaluate
from trainer.callbacks.profile import Profile as Profile, profile as profile
from trainer.callbacks.progress import Progress as Progress
