"""A byte-level tokenizer made in the test, and chat templates that behave like those in the wild."""

from __future__ import annotations

import functools

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CHATML = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

TAGGED = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}
{%- generation %}{{- message.content + '<|im_end|>' }}{%- endgeneration %}
{%- else %}{{- message.content + '<|im_end|>' }}{%- endif %}{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# Drops the reasoning of earlier turns, and puts an empty think block into the last (as Qwen3 does).
REWRITING = """{%- for message in messages %}
{%- if message.role == 'assistant' %}
{%- set thought = message.reasoning_content or '' %}
{%- set content = message.content %}
{%- if '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.last %}{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}{%- endif %}
{{- content + '<|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

# The prompt opens the think block, finished turns are shown without it (as DeepSeek-R1 does).
OPENS_THINK = """{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + message.content.split('</think>')[-1].lstrip('\\n') + '<|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"""

# Ends the last turn by the end-of-turn token and a second control token (as Phi-3 does).
ENDS_TWICE = CHATML.replace(
    "{%- if add_generation_prompt %}",
    "{%- if not add_generation_prompt %}{{- '<|endoftext|>' }}{%- endif %}{%- if add_generation_prompt %}",
)

# Writes no end of turn: the model stops by the token that begins the next (as GLM-4 does).
ENDED_BY_NEXT = """{%- for message in messages %}
{{- '<|' + message.role + '|>\\n' + message.content }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""

# Reads content as a list of parts and loses plain text (as templates of image models do).
PARTS_ONLY = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- for part in message.content %}{%- if part.type == 'text' %}{{- part.text }}{%- endif %}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# Joins a call's arguments to text, which fails on a mapping (as DeepSeek-V3 does).
TEXT_ARGUMENTS = CHATML.replace("(call.function.arguments | tojson)", "call.function.arguments")

CONTROL = ("<|im_start|>", "<|endoftext|>", "<|user|>", "<|assistant|>")

_TEXT = [
    "The quick brown fox jumps over the lazy dog. How many apples are there? There are three apples.",
    "user assistant system think tool_call name arguments weather in Paris is sunny today",
    "def add(a, b):\n    return a + b\n\n\nNumbers: 1 2 3 4 5 6 7 8 9 10 100",
] * 20


@functools.cache
def _backend() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    return tokenizer.to_str()


def make_tokenizer(template: str = CHATML) -> PreTrainedTokenizerFast:
    """Byte-level BPE of 400 entries with ChatML control tokens."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_backend()), eos_token="<|im_end|>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(CONTROL)})
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    tokenizer.chat_template = template
    return tokenizer
