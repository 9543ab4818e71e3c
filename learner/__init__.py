"""The learner: from groups to gradients to new policy versions. `loop.py` is the place to start."""
