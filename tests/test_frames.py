"""Which files read frames or code objects, in which versions of Python differ, and which tests fail where such a reading goes wrong.

When a version of Python is added to pyproject.toml, these tests are run on it.
"""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
READS = re.compile(r"currentframe|walk_stack|f_back|f_locals|co_names|co_consts|__code__")
TESTED_BY = {
    "commands/plan_command.py": "commands/test_plan_command.py",
    "lightning_package.py": "test_lightning_package.py",
    "lightning_private.py": "test_lightning_private.py",
    "optim/after_step.py": "optim/test_after_step.py",
    "pipeline/noticed_functions.py": "strategy/test_later_state.py",
    "pipeline/outside.py": "strategy/test_outside_state.py",
    "pipeline/shadow.py": "pipeline/test_shadow.py",
    "pipeline/whole_steps.py": "strategy/test_whole_steps.py",
    "strategy/compat/optimizer_states.py": "strategy/test_optimizers.py",
    "strategy/tripwires.py": "strategy/test_tripwires.py",
    "strategy/user_hooks.py": "strategy/test_user_hooks.py",
}


def test_each_file_that_reads_frames_has_a_test() -> None:
    package = ROOT / "lightning_holmes"
    reading = [p for p in package.rglob("*.py") if READS.search(p.read_text(encoding="utf-8"))]
    found = {str(p.relative_to(package)) for p in reading if p.parent.name != "comm"}  # which only describes stacks
    assert found <= set(TESTED_BY), "name the test that shows that it works on every version"
    assert all((ROOT / "tests" / TESTED_BY[file]).is_file() for file in found)
