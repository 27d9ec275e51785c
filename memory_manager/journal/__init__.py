"""The journal: what happened, on disk, so that a manager that was killed comes back as it was."""
