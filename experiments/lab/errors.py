"""The error whose message is all that its reader needs."""


class UserError(Exception):
    """What the user can mend: shown as it is, without a traceback."""
