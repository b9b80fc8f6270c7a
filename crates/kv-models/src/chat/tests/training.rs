//! Templates made for training, in the shapes of those of Llama 3, Qwen2.5, Qwen3 and SmolLM3.

use super::super::ChatTemplate;
use super::{Message, conversation};

/// The shape of Llama 3's: the marks are named in a comment too.
const LLAMA3: &str = r##"{#- For training: {% generation %} and {% endgeneration %} around what the model says. -#}
{%- for message in messages %}
    {%- if loop.index0 == 0 %}{{- bos_token }}{%- endif %}
    {%- if message['role'] == 'assistant' %}
        {{- '<|header|>assistant<|end|>\n\n' }}
        {%- generation %}
        {{- message['content'] | trim + '<|eot|>' }}
        {%- endgeneration %}
    {%- else %}
        {{- '<|header|>' + message['role'] + '<|end|>\n\n' + message['content'] | trim + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|header|>assistant<|end|>\n\n' }}
{%- endif %}
"##;

/// The shape of Qwen2.5's: blocks within the marks.
const QWEN2_5: &str = r##"{%- for message in messages %}
    {%- if message.role == "user" or message.role == "system" and not loop.first %}
        {{- '<|start|>' + message.role + '\n' + message.content + '<|end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|start|>assistant' }}
        {%- generation %}
        {%- if not message.tool_calls %}
            {{- '\n' + message.content + '<|end|>\n' }}
        {%- else %}
            {%- for tool_call in message.tool_calls %}
                {{- '\n' + tool_call | tojson }}
            {%- endfor %}
            {{- '<|end|>\n' }}
        {%- endif %}
        {%- endgeneration %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant\n' }}
{%- endif %}
"##;

/// The shape of Qwen3's: a variable that is set within the marks is not known behind them.
const QWEN3: &str = r##"{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "user" %}
        {{- '<|start|>' + message.role + '\n' + content + '<|end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {%- set thought = '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|start|>' + message.role + '\n' }}
        {%- generation %}
        {%- set shown = content.lstrip('\n') %}
        {{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + shown }}
        {{- '<|end|>\n' }}
        {%- endgeneration %}
        {{- 'leaked' if shown is defined }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}"##;

/// The shape of SmolLM3's: marks without whitespace control among blocks with it.
const SMOLLM3: &str = r##"{%- set reasoning_mode = "/think" if enable_thinking is not defined or enable_thinking else "/no_think" -%}
{{- "<|start|>system\nReasoning Mode: " + reasoning_mode + "<|end|>\n" -}}
{%- for message in messages -%}
    {%- if message.role == "user" -%}
        {{ "<|start|>" + message.role + "\n" + message.content + "<|end|>\n" }}
    {%- elif message.role == "assistant" -%}
        {% generation %}
        {%- if reasoning_mode == "/think" -%}
            {{ "<|start|>assistant\n" + message.content.lstrip("\n") + "<|end|>\n" }}
        {%- else -%}
            {{ "<|start|>assistant\n" + "<think>\n\n</think>\n" + message.content.lstrip("\n") + "<|end|>\n" }}
        {%- endif -%}
        {% endgeneration %}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ "<|start|>assistant\n" if reasoning_mode == "/think" else "<|start|>assistant\n<think>\n\n</think>\n" }}
{%- endif -%}
"##;

#[test]
fn marks_for_training_render_what_is_inside() {
    for (template, expected) in [
        (
            LLAMA3,
            "<s><|header|>user<|end|>\n\nHi <you> & 'me'?<|eot|><|header|>assistant<|end|>\n\n\
             <think>\nhm\n</think>\n\nHello é<|eot|><|header|>user<|end|>\n\nBye<|eot|>\
             <|header|>assistant<|end|>\n\n",
        ),
        (
            QWEN2_5,
            "<|start|>user\n Hi <you> & 'me'? <|end|>\n<|start|>assistant\n\
             <think>\nhm\n</think>\n\nHello é<|end|>\n<|start|>user\nBye\n<|end|>\n<|start|>assistant\n",
        ),
        (
            QWEN3,
            "<|start|>user\n Hi <you> & 'me'? <|end|>\n<|start|>assistant\n\
             <think>\nhm\n</think>\n\nHello é<|end|>\n<|start|>user\nBye\n<|end|>\n<|start|>assistant\n",
        ),
        (
            SMOLLM3,
            "<|start|>system\nReasoning Mode: /think<|end|>\n\
             <|start|>user\n Hi <you> & 'me'? <|end|>\n\
             <|start|>assistant\n<think>\nhm\n</think>\n\nHello é<|end|>\n\
             <|start|>user\nBye\n<|end|>\n<|start|>assistant\n",
        ),
    ] {
        let template = ChatTemplate::new(template).unwrap().with_variable("bos_token", "<s>");
        assert_eq!(template.render(&conversation(), true).unwrap(), expected);
    }
}

#[test]
fn thinking_can_be_switched_off() {
    for (template, end) in [
        (QWEN3, "<|start|>assistant\n<think>\n\n</think>\n\n"),
        (SMOLLM3, "<|start|>assistant\n<think>\n\n</think>\n"),
    ] {
        let template = ChatTemplate::new(template).unwrap().with_variable("enable_thinking", false);
        let text = template.render(&[Message::user("x")], true).unwrap();
        assert!(text.ends_with(end), "{text}");
    }
}

#[test]
fn marks_control_whitespace_as_other_blocks_do() {
    let template = "a\n  {% generation %}\n  b\n  {% endgeneration %}\nc {%+ generation +%}\n \
                    d{% endgeneration -%}\n e";
    let text = ChatTemplate::new(template).unwrap().render(&[], false).unwrap();
    assert_eq!(text, "a\n  b\nc \n de");
}

#[test]
fn line_ends_are_jinja_s() {
    let template = "a\r\nb\rc{% if true %}\r\nd{% endif %}\r\n";
    let text = ChatTemplate::new(template).unwrap().render(&[], false).unwrap();
    assert_eq!(text, "a\nb\ncd");
}

#[test]
fn kinds_of_values_are_jinja_s() {
    for (kind, expected) in [
        ("iterable", "01111001"),
        ("sequence", "01111001"),
        ("mapping", "00001001"),
        ("string", "00100000"),
    ] {
        let values = "[none, y, 'a', [], {}, 1, true, messages[0]]";
        let template =
            format!("{{% for x in {values} %}}{{{{ 1 if x is {kind} else 0 }}}}{{% endfor %}}");
        let template = ChatTemplate::new(template).unwrap();
        assert_eq!(template.render(&[Message::user("x")], false).unwrap(), expected, "{kind}");
    }
}
