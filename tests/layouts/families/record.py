"""Add the names and shapes of Megatron-Core's tensors to the files of this folder (environment: .venv-frameworks).

.venv-frameworks/bin/python -m tests.layouts.families.record [FAMILY ...]
"""

import json
import sys

from tests.frameworks.megatron.test_foreign_layouts import Model
from tests.layouts.models import FAMILIES, FOLDER, collapsed

for name in sys.argv[1:] or FAMILIES:
    file = FOLDER / f"{name}.json"
    text = file.read_text()
    added = json.dumps(collapsed(Model(name).shapes()), indent=1).replace("\n", "\n ")
    if '"megatron": {' not in text:
        file.write_text(text.rstrip().removesuffix("}").rstrip() + ',\n "megatron": ' + added + "\n}\n")
    assert json.loads(file.read_text())["megatron"] == json.loads(added)
