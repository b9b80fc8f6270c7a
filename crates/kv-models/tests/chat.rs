//! A model folder with a chat template.

use kv_models::{ChatTemplate, Message, Model, ModelError};
use kv_testing::devices;
use serde_json::json;

use super::support::{configure, embedded_folder};

#[test]
fn a_folder_s_own_template_makes_the_prompt() {
    let tested = &devices()[0];
    let folder = embedded_folder();
    let messages = [Message::user("What is the sea?")];
    let model = Model::from_folder(folder.path(), &tested.device, None).unwrap();
    let error = model.encode_chat(&messages).unwrap_err();
    assert!(matches!(error, ModelError::MissingChatTemplate { .. }), "{error}");

    let template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}\
                    {% if add_generation_prompt %}<assistant>{% endif %}";
    std::fs::write(folder.path().join("chat_template.jinja"), template).unwrap();
    let model = Model::from_folder(folder.path(), &tested.device, None).unwrap();
    let tokens = model.encode_chat(&messages).unwrap();
    assert_eq!(model.decode(&tokens).unwrap(), "<user>What is the sea?\n<assistant>");
}

#[test]
fn variables_of_the_template_can_be_set() {
    let tested = &devices()[0];
    let folder = embedded_folder();
    let template = "{{ messages[0].content }}{% if enable_thinking is false %}!{% endif %}";
    std::fs::write(folder.path().join("chat_template.jinja"), template).unwrap();
    let model = Model::from_folder(folder.path(), &tested.device, None).unwrap();
    let messages = [Message::user("hm")];
    let text = |variables: serde_json::Value| {
        let variables = variables.as_object().unwrap();
        model.decode(&model.encode_chat_with(&messages, variables).unwrap()).unwrap()
    };
    assert_eq!(text(json!({})), "hm");
    assert_eq!(text(json!({"enable_thinking": false})), "hm!");
}

/// Models whose weights cannot be loaded say whether they have a template.
#[test]
fn a_template_is_found_without_the_weights() {
    let folder = embedded_folder();
    std::fs::remove_file(folder.path().join("model.safetensors")).unwrap();
    let name = folder.path().to_str().unwrap();
    for name in [name, "needle-1m", "random:llama-3.1-8b"] {
        let error = ChatTemplate::from_name(name).unwrap_err();
        let ModelError::MissingChatTemplate { path } = error else { panic!("{error}") };
        assert_eq!(path.to_str().unwrap(), name);
    }
    std::fs::write(folder.path().join("chat_template.jinja"), "{{ messages[0].content }}").unwrap();
    let template = ChatTemplate::from_name(name).unwrap();
    assert_eq!(template.render(&[Message::user("hm")], true).unwrap(), "hm");
}

/// Who does not use a template does not need one that parses.
#[test]
fn a_template_that_does_not_parse_is_an_error_where_it_is_used() {
    let tested = &devices()[0];
    let folder = embedded_folder();
    std::fs::write(folder.path().join("chat_template.jinja"), "{% if %}").unwrap();
    let model = Model::from_folder(folder.path(), &tested.device, None).unwrap();
    assert!(model.encode("The sea").is_ok());
    let error = model.encode_chat(&[Message::user("The sea")]).unwrap_err();
    assert!(matches!(error, ModelError::ChatTemplate { .. }), "{error}");
}

/// Where the configuration names no end token, the tokenizer's own ends a text.
#[test]
fn the_end_token_is_the_tokenizer_s_where_the_configuration_names_none() {
    let tested = &devices()[0];
    let folder = embedded_folder();
    configure(folder.path(), "eos_token_id", json!(null));
    let load = || Model::from_folder(folder.path(), &tested.device, None).unwrap();
    assert!(load().config().eos_token_ids.is_empty());
    let tokenizer = folder.path().join("tokenizer_config.json");
    std::fs::write(&tokenizer, r#"{"eos_token": "<|endoftext|>"}"#).unwrap();
    let model = load();
    let end = model.tokenizer().unwrap().token_id("<|endoftext|>").unwrap();
    assert_eq!(model.config().eos_token_ids, [end]);
    std::fs::write(&tokenizer, r#"{"eos_token": "no such token"}"#).unwrap();
    assert!(load().config().eos_token_ids.is_empty());
}
