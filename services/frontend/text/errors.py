"""What can be wrong with a model's text side (tokenizer, chat template)."""


class ModelTextError(Exception):
    """The tokenizer or template files cannot be used; the message says which and why."""


class TemplateError(Exception):
    """The chat template refused these messages; the message is for the client."""
