"""Take any vision transformer, change how it attends, and know what that did."""

__version__ = "0.1.0"
