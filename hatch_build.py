"""Packs `strategies/`, which is `eqx_norm/strategies` in a wheel.

It lies at top level, where readers look for it, and in a checkout `eqx_norm/strategies` is a
link to it. Without symbolic links (Windows's default) git writes a text file instead, from
which a wheel would be built that cannot be imported. So the link is never packed.
"""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CustomBuildHook(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Packs `strategies/`; ends the build, in words, where there is nothing to pack."""
        strategies = Path(self.root, "strategies")
        if not (strategies / "__init__.py").is_file():
            self.app.abort(
                f"eqx-norm cannot be built: {strategies} is missing or has no __init__.py. It "
                "is part of the repository; git checkout -- strategies brings it back."
            )
        linked = Path(self.root, "eqx_norm", "strategies", "__init__.py")
        if version == "editable" and not linked.is_file():
            self.app.abort(
                f"eqx-norm cannot be installed as editable: {linked.parent} is no link to "
                "../strategies. Check the repository out with symbolic links (git config "
                "core.symlinks true; git checkout -- eqx_norm/strategies; on Windows, turn on "
                "Developer Mode first), or install without --editable."
            )
        if version == "editable":
            return
        # hatchling walks a folder once, and may have come to strategies/ through the link. An
        # sdist has it at top level, as a checkout does.
        home = Path("eqx_norm") if self.target_name == "wheel" else Path()
        for file in strategies.rglob("*.py"):
            place = home / "strategies" / file.relative_to(strategies)
            build_data["force_include"][str(file)] = str(place)
