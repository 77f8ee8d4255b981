"""Where metrics go. A sink is chosen by the scheme of its address in the setting `metrics`."""

from bytecheckpoint.monitoring.sinks.base import Sink, make_sink, shown

__all__ = ["Sink", "make_sink", "shown"]
