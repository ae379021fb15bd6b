"""The one exception for mistakes a user can mend; the command line prints it as a sentence and exits with 2."""


class UserError(ValueError):
    """A wrong name, size, option or file: the message names the thing and the remedy."""
