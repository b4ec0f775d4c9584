"""How rows and messages are spelled: the keys of role and text, the names of roles, keys that change nothing."""

from collections.abc import Iterable

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "tool_response": "tool",
    "function_response": "tool",
    "function_call": "assistant",
}
ROLE_AND_TEXT = (("role", "content"), ("from", "value"))  # keys of a message

# Keys that say where a row or message came from and nothing of what is learned. Any other key is read or noted.
INERT = frozenset({
    "id", "ids", "uuid", "idx", "index", "row", "number", "hash", "key", "md5", "sha256", "conversation_id",
    "conversation_hash", "chat_id", "session_id", "thread_id", "message_id", "prompt_id", "question_id",
    "parent_id", "row_id", "turn_identifier", "hashed_ip", "header", "state", "country", "user_id", "source",
    "sources", "dataset", "dataset_name", "origin", "url", "urls", "link", "license", "author", "title", "file",
    "file_name", "filename", "path", "split", "version", "language", "lang", "domain", "group", "category", "topic",
    "tags", "subset", "task", "task_type", "task_name", "difficulty", "level", "model", "model_name", "generator",
    "timestamp", "date", "time", "created", "created_at", "updated_at", "create_time", "turn", "turns", "num_turns",
    "redacted", "toxic", "openai_moderation", "detoxify_moderation", "score", "rating", "quality", "num_tokens",
    "token_count", "tokens_count", "length", "metadata", "meta", "info", "__index_level_0__",
})  # fmt: skip


def unread_keys(keys: Iterable[str], read: Iterable[str]) -> list[str]:
    """The keys that are neither read nor inert, in order."""
    known = {*read, *INERT}
    return [key for key in keys if key not in known]
