"""The one error type that a person who uses TreeGraft can cause and can mend."""


class UserError(ValueError):
    """Bad input: the message is one sentence that says what is wrong, where, and what to do.

    Library code raises it; the command line alone turns it into exit code 2 without a traceback.
    """
