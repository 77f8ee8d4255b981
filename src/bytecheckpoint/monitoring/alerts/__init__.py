"""Find the saves and loads that need attention, by rules."""

from bytecheckpoint.monitoring.alert import Alert
from bytecheckpoint.monitoring.alerts.evaluation import Evaluation
from bytecheckpoint.monitoring.alerts.rules import AlertRule, load_rules

__all__ = ["Alert", "AlertRule", "Evaluation", "load_rules"]
