"""Random conversations over random small templates: the supervised runs are the answers and their ends of turn.

What is expected is worked out from the choices that make the template, not from its rendered text.
"""

import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from toy import chat_tokenizer, rows, supervised_runs, tokenised

THINK = "<t>\n</t>\n"
ROLES = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}


@dataclass(frozen=True)
class Style:
    """The choices that make a small template."""

    bos: bool
    default_system: bool
    user: str
    assistant: str
    before_end: str
    end: str
    between: str
    trims: bool
    marks: bool
    strips_history: bool  # earlier answers lose what stands before </t>
    think: str  # "": no think block; "last": an empty one in the last answer; "prompt": in the generation prompt, too
    eos_at_end: bool

    @property
    def template(self) -> str:
        text = "m.content.split('</t>')[-1] if not loop.last else m.content" if self.strips_history else "m.content"
        body = f"{{{{ ({text}){' | trim' if self.trims else ''} }}}}{self.before_end}{self.end}"
        if self.marks:
            body = f"{{% generation %}}{body}{{% endgeneration %}}"
        think = f"{{{{ {THINK!r} if loop.last }}}}" if self.think else ""
        prompt = self.assistant + (THINK if self.think == "prompt" else "")
        return (
            ("{{ bos_token }}" if self.bos else "")
            + ("{% if messages[0].role != 'system' %}[U]sys[E]{% endif %}" if self.default_system else "")
            + "{% for m in messages %}{% if m.role == 'assistant' %}"
            + f"{{{{ {self.assistant!r} }}}}{think}{body}{{% else %}}"
            + f"{{{{ {self.user!r} + m.role + ': ' + m.content }}}}{self.before_end}{self.end}{{% endif %}}"
            + f"{{{{ {self.between!r} }}}}{{% endfor %}}"
            + f"{{% if add_generation_prompt %}}{{{{ {prompt!r} }}}}"
            + ("{% else %}{{ eos_token }}" if self.eos_at_end else "")
            + "{% endif %}"
        )

    def rewrites(self, answers: list[str]) -> bool:
        """Whether an earlier answer is written otherwise than it was as the last one."""
        earlier = answers[:-1]
        return bool(self.think and earlier) or (self.strips_history and any("</t>" in answer for answer in earlier))

    def written(self, answer: str, is_finished: bool = True) -> str:
        text = answer.strip() if self.trims else answer
        # A newline that is trimmed off and written again is the answer's own.
        cut = answer if answer == text + self.before_end else text
        return text + self.before_end + self.end if is_finished else cut


styles = st.builds(
    Style,
    bos=st.booleans(),
    default_system=st.booleans(),
    user=st.sampled_from(["[U]", "[U]user\n", "user says "]),
    assistant=st.sampled_from(["[A]", "[A]assistant\n", "[U]bot: "]),
    before_end=st.sampled_from(["", "\n"]),
    end=st.sampled_from(["[E]", "[EOS]"]),
    between=st.sampled_from(["", "\n"]),
    trims=st.booleans(),
    marks=st.just(False),
    strips_history=st.booleans(),
    think=st.sampled_from(["", "", "last", "prompt"]),
    eos_at_end=st.booleans(),
)
marking = st.builds(
    Style,
    bos=st.booleans(),
    default_system=st.booleans(),
    user=st.sampled_from(["[U]", "user says "]),
    assistant=st.sampled_from(["[A]", "[A]assistant\n"]),
    before_end=st.just(""),
    end=st.sampled_from(["[E]", "[EOS]"]),
    between=st.sampled_from(["", "\n"]),
    trims=st.booleans(),
    marks=st.just(True),
    strips_history=st.just(False),
    think=st.just(""),
    eos_at_end=st.booleans(),
)
texts = st.text(alphabet="ab \né😀&<[", max_size=6) | st.sampled_from(
    ["", "[E]", "x[A]y", "<t>a</t>b", "</t>b", "bot: ", "[A]assistant\n", "<t>\n</t>\n", "[MASK]ab"]
)
conversations = st.builds(
    lambda roles, said: [{"role": ROLES[role], "content": text} for role, text in zip(roles, said, strict=False)],
    st.lists(st.sampled_from("suuaaat"), min_size=1, max_size=6),
    st.lists(texts, min_size=6, max_size=6),
)


def expected(style: Style, conversation: list[dict[str, str]], is_finished: bool) -> list[list[str]]:
    """The supervised runs of each row."""
    opening = next((i for i, m in enumerate(conversation) if m["role"] != "assistant"), len(conversation))
    answers = [m["content"] for m in conversation[opening:] if m["role"] == "assistant"]
    last_has_text = bool(answers and answers[-1].strip())
    answers = [answer for answer in answers if answer.strip()]
    if not answers:
        return []
    finished = [True] * (len(answers) - 1) + [is_finished or not last_has_text]
    runs = [style.written(answer, done) for answer, done in zip(answers, finished, strict=True)]
    opened = [m["content"] for m in conversation[:opening]]
    return [[run] for run in runs] if style.rewrites([*opened, *answers]) else [runs]


TRIMS_BEHIND_A_THINK_BLOCK = Style(
    bos=False,
    default_system=False,
    user="[U]",
    assistant="[A]assistant\n",
    before_end="\n",
    end="[E]",
    between="",
    trims=True,
    marks=False,
    strips_history=False,
    think="last",
    eos_at_end=False,
)
ASKED = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "[A]assistant\n"}]


@settings(max_examples=120, deadline=None)
@example(TRIMS_BEHIND_A_THINK_BLOCK, ASKED, False)
@given(styles | marking, conversations, st.booleans())
def test_supervised_runs_are_the_answers_and_their_ends_of_turn(style, conversation, is_finished):
    roles = [message["role"] for message in conversation]
    # A template that writes its last message in another way cannot write what it asks for after an answer to itself.
    assume(not ((style.think or style.strips_history) and ("assistant", "assistant") in pairwise(roles)))
    with tempfile.TemporaryDirectory() as directory:
        chat = chat_tokenizer(Path(directory), style.template, merges=((b"a", b"b"),))
        made = tokenised(chat, [conversation], finished=[is_finished])
        assert supervised_runs(chat, made) == expected(style, conversation, is_finished)
        for ids, mask in rows(made):
            assert mask[0] == 0
            if not any(text in m["content"] for m in conversation for text in ("[E]", "[A]", "[MASK]")):
                own = chat._tokenizer.decode(ids, skip_special_tokens=False)
                assert chat._tokenizer(own, add_special_tokens=False)["input_ids"] == ids
