"""Send metrics to sinks, chosen by the schemes of the addresses in the setting `metrics`."""

from bytecheckpoint.monitoring.sinks.base import Sink, make_sink, shown

__all__ = ["Sink", "make_sink", "shown"]
