"""The chat templates of a tokenizer: one for all rows, or two where it has another for rows with tools."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cache.chat.message import Message
from cache.chat.template import BadTemplate, Template
from cache.config import names_a_template

WITH_TOOLS = "tool_use"  # the name by which transformers, and servers that use it, choose for a row with tools


@dataclass(frozen=True, slots=True)
class Templates:
    """Both are the same object where a tokenizer has one template, or rows.template names one."""

    plain: Template
    with_tools: Template

    def of(self, tools: list[Message] | None) -> Template:
        """The template of a row with these tools."""
        return self.with_tools if tools else self.plain

    @property
    def source(self) -> str:
        """The text of both."""
        return "\n".join(dict.fromkeys((self.plain.source, self.with_tools.source)))


def load_templates(tokenizer: Any, directory: Path, named: str | None, arguments: dict[str, Any]) -> Templates:
    """The tokenizer's own chat templates, the one of them that is `named`, or the one in the file that is.

    `arguments` are the same for all rows. A row with tools has the one of that name, as `apply_chat_template` chooses.
    """
    own = tokenizer.chat_template
    by_name: dict[str, str] = own if isinstance(own, dict) else {} if own is None else {"default": own}
    names = {**tokenizer.special_tokens_map, **arguments}

    def template(name: str) -> Template:
        which = (
            f"the chat template {name!r} of {directory}" if len(by_name) > 1 else f"the chat template of {directory}"
        )
        return Template(by_name[name], names, which, is_served=named is None)

    told = ", ".join(by_name)
    if named is not None and not names_a_template(named):
        file = Template(Path(named).read_text(encoding="utf-8"), names, f"the chat template {named}")
        return Templates(file, file)
    if named is not None and named not in by_name:
        raise BadTemplate(
            f"rows.template is {named!r}, and the tokenizer in {directory} has no chat template of that name, expected "
            f"one of {told or 'none'}, or the path of a file: write ./{named} for one in the working directory."
        )
    if not by_name:
        raise BadTemplate(
            f"the tokenizer in {directory} has no chat template, expected chat_template.jinja or one in"
            " tokenizer_config.json. Name a Jinja file in rows.template, or use the target's instruct model."
        )
    if named is None and "default" not in by_name:
        raise BadTemplate(
            f"the tokenizer in {directory} has the chat templates {told}, and none that is the default. Name the one"
            f" with which the target will be served in rows.template, such as rows.template={next(iter(by_name))}."
        )
    plain = template(named or "default")
    if named is None and WITH_TOOLS in by_name:
        return Templates(plain, template(WITH_TOOLS))
    return Templates(plain, plain)
