"""The exceptions of this package. Wrong arguments raise ``ValueError``; what the world does raises these."""

from __future__ import annotations


class ResilientError(Exception):
    """Base of all errors that are not the caller's."""


class CommunicationError(ResilientError):
    """A peer of this generation is gone, or the generation was aborted; the worker goes into recovery."""


class CheckpointError(ResilientError):
    """A checkpoint cannot be read or does not fit the job."""


class SampleError(ResilientError, ValueError):
    """A sample of the data set cannot be trained on; the message names it."""


class ControlError(ResilientError):
    """The connection to the node agent is gone or spoke out of turn."""


class StateLostError(ResilientError):
    """No live node holds some layer's state any more, and there is no checkpoint to take it from."""
