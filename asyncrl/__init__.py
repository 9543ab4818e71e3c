"""What the three programs share: words, configuration, wire format, journal, tasks, launcher.

Nothing in here imports `buffer`, `generators` or `learner`; they import this.
"""

__version__ = "0.1.0"
