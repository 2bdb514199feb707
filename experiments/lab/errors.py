"""Defines the error whose message is all that its reader needs."""


class UserError(Exception):
    """Raised for what the user can mend; its message is shown without a traceback."""
