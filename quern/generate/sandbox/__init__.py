"""The sandbox: it runs Python programs that nobody has read, such as a model's answers, and says whether they pass.

The host's side is here; `guest/` is the side inside, which imports the standard library only. docs/sandbox.md has the
tiers, the limits, and the attacks that are not excluded.
"""

from quern.generate.sandbox.pool import Limits, Outcome, Program, Sandbox, SandboxError

__all__ = ["Limits", "Outcome", "Program", "Sandbox", "SandboxError"]
