"""A griffe extension: a docstring's `Example:` is shown as code, as `Examples:` is."""

import re
from typing import Any

import griffe


class ExampleIsExamples(griffe.Extension):
    """Griffe knows the section by its plural alone."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rename the section before it is parsed."""
        del kwargs
        if obj.docstring is not None:
            found = obj.docstring.value
            obj.docstring.value = re.sub(r"(?m)^Example:$", "Examples:", found)
