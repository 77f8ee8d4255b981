"""Layouts: statements how the tensors of one naming lie in those of another naming (docs/layouts.md).

from bytecheckpoint.layouts import Layout, Rule
mine = Layout("mine", "hf", "own", rules=[Rule({"h.{l}.c_proj.weight": "a h"}, {"blocks.{l}.out.weight": "h a"})])
"""

from bytecheckpoint.layouts.layout import Layout, LayoutArgument
from bytecheckpoint.layouts.statements import Alias, Prefix, Rule, Scales, Statement

__all__ = ["Alias", "Layout", "LayoutArgument", "Prefix", "Rule", "Scales", "Statement"]
