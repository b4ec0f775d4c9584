"""How the messages of a conversation are spelled: the keys of role and text, and the names that roles go by."""

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
