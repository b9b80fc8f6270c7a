//! The expected prompts come from Python's jinja2, set up as `transformers` sets it up.

mod training;

use std::fs;

use super::{ChatTemplate, Message};
use crate::error::ModelError;

/// Headers, a system message taken out by a slice, whitespace control.
const HEADERS: &str = r#"{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{#- The system message has its own place. #}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|header|>system<|end|>\n\n" }}
{%- if tools is not none %}
    {{- "Tools\n" }}
{%- endif %}
{{- "Date: " + date_string + "\n\n" + system_message + "<|eot|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|header|>' + message['role'] + '<|end|>\n\n'+ message['content'] | trim + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|header|>assistant<|end|>\n\n' }}
{%- endif %}
"#;

/// Namespaces, reversal, Python's string methods, an optional variable.
const THINKING: &str = r#"{%- set ns = namespace(searching=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" and message.content is string and not(message.content.startswith('<tool>') and message.content.endswith('</tool>')) %}
        {%- set ns.searching = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == "assistant" %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {%- set content = '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content %}
        {%- endif %}
        {%- if message.tool_calls %}{{- raise_exception('no tools') }}{%- endif %}
    {%- endif %}
    {{- '<|start|>' + message.role + '\n' + content + '<|end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}"#;

/// Trimmed blocks without dashes, alternation, filters with tests, `tojson`, `break`.
const ALTERNATING: &str = r#"{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Roles must alternate') }}
{% endif %}
    {% if message['role'] == 'user' %}
{{ '[INST] ' + message['content'] + ' [/INST]' }}
    {% elif message['role'] == 'assistant' %}
{{ ' ' + message['content'] + eos_token}}
    {% endif %}
{% endfor %}
{{ messages | selectattr("role", "equalto", "user") | map(attribute="content") | list | tojson }}
{{ {"a": [1, true, none], "b": {}} | tojson(indent=2) }}
{% for message in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}{{ message.content | upper }}{% endfor %}
"#;

fn conversation() -> Vec<Message> {
    vec![
        Message::user(" Hi <you> & 'me'? "),
        Message::assistant("<think>\nhm\n</think>\n\nHello é"),
        Message::user("Bye\n"),
    ]
}

#[test]
fn headers_and_dates() {
    let template = ChatTemplate::new(HEADERS).unwrap().with_variable("bos_token", "<s>");
    let dated = template.clone().with_variable("date_string", "26 Jul 2024");
    let mut messages = vec![Message::system(" Be brief. ")];
    messages.extend(conversation());
    assert_eq!(
        dated.render(&messages, true).unwrap(),
        "<s><|header|>system<|end|>\n\nDate: 26 Jul 2024\n\nBe brief.<|eot|>\
         <|header|>user<|end|>\n\nHi <you> & 'me'?<|eot|>\
         <|header|>assistant<|end|>\n\n<think>\nhm\n</think>\n\nHello é<|eot|>\
         <|header|>user<|end|>\n\nBye<|eot|><|header|>assistant<|end|>\n\n"
    );
    let today = template.render(&messages, false).unwrap();
    assert!(today.contains("Date: ") && today.ends_with("Bye<|eot|>"), "{today}");
}

#[test]
fn thoughts_are_left_out() {
    let template = ChatTemplate::new(THINKING).unwrap();
    assert_eq!(
        template.render(&conversation(), true).unwrap(),
        "<|start|>user\n Hi <you> & 'me'? <|end|>\n<|start|>assistant\nHello é<|end|>\n\
         <|start|>user\nBye\n<|end|>\n<|start|>assistant\n"
    );
    assert_eq!(
        template.render(&conversation()[..2], false).unwrap(),
        "<|start|>user\n Hi <you> & 'me'? <|end|>\n\
         <|start|>assistant\n<think>\nhm\n</think>\n\nHello é<|end|>\n"
    );
    let off = template.with_variable("enable_thinking", false);
    assert_eq!(
        off.render(&[Message::user("x")], true).unwrap(),
        "<|start|>user\nx<|end|>\n<|start|>assistant\n<think>\n\n</think>\n\n"
    );
}

#[test]
fn blocks_are_trimmed_and_json_is_pythons() {
    let template = ChatTemplate::new(ALTERNATING)
        .unwrap()
        .with_variable("bos_token", "<s>")
        .with_variable("eos_token", "</s>");
    assert_eq!(
        template.render(&conversation(), true).unwrap(),
        "<s>[INST]  Hi <you> & 'me'?  [/INST]\n <think>\nhm\n</think>\n\nHello é</s>\n\
         [INST] Bye\n [/INST]\n[\" Hi <you> & 'me'? \", \"Bye\\n\"]\n\
         {\n  \"a\": [\n    1,\n    true,\n    null\n  ],\n  \"b\": {}\n}\n HI <YOU> & 'ME'? "
    );
}

#[test]
fn a_template_can_refuse() {
    let template = ChatTemplate::new(ALTERNATING).unwrap();
    let error = template.render(&[Message::assistant("first")], false).unwrap_err();
    assert!(matches!(error, ModelError::ChatTemplate { .. }));
    assert!(error.to_string().contains("Roles must alternate"), "{error}");
    assert!(matches!(ChatTemplate::new("{% if %}"), Err(ModelError::ChatTemplate { .. })));
    // Attributes of what is not there.
    assert!(ChatTemplate::new("{{ messages[0].content }}").unwrap().render(&[], false).is_err());
}

#[test]
fn templates_of_a_folder() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let config = |text: &str| fs::write(path.join("tokenizer_config.json"), text).unwrap();
    let render = || ChatTemplate::from_folder(path)?.render(&[Message::user("hi")], true);
    assert!(matches!(render(), Err(ModelError::MissingChatTemplate { .. })));
    config(r#"{"bos_token": "<s>"}"#);
    assert!(matches!(render(), Err(ModelError::MissingChatTemplate { .. })));
    config(
        r#"{"bos_token": {"content": "<s>", "lstrip": false}, "eos_token": "</s>",
            "pad_token": null, "chat_template":
            "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{% if pad_token is defined %}pad{% endif %}"}"#,
    );
    assert_eq!(render().unwrap(), "<s>hi</s>");
    config(
        r#"{"chat_template": [{"name": "tool_use", "template": "tools"},
            {"name": "default", "template": "plain"}]}"#,
    );
    assert_eq!(render().unwrap(), "plain");
    fs::write(path.join("chat_template.jinja"), "file: {{ messages[0].role }}\n").unwrap();
    assert_eq!(render().unwrap(), "file: user");
    // Special tokens that another file alone names; `tokenizer_config.json` goes first.
    fs::write(path.join("chat_template.jinja"), "{{ bos_token }}{{ eos_token }}").unwrap();
    config(r#"{"bos_token": null, "eos_token": "</s>"}"#);
    let map = path.join("special_tokens_map.json");
    fs::write(&map, r#"{"bos_token": {"content": "<s>"}, "eos_token": "<end>"}"#).unwrap();
    assert_eq!(render().unwrap(), "<s></s>");
    fs::write(&map, "[]").unwrap();
    assert!(matches!(render(), Err(ModelError::InvalidJson { .. })));
    fs::remove_file(&map).unwrap();
    config("{");
    assert!(matches!(render(), Err(ModelError::InvalidJson { .. })));
}
