"""What a command needs beyond the plain install, asked for before any work begins."""

from __future__ import annotations

from importlib.util import find_spec

from ..errors import SettingError


def require(what: str, *modules: str, extra: str = "real") -> None:
    """Raise `SettingError` unless all `modules` can be imported; `what` is what needs them, as the error's
    first words. Nothing is imported here."""
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise SettingError(
            f"{what} needs {' and '.join(missing)}, not installed here. Run pip install 'finemoe[{extra}]'."
        )
