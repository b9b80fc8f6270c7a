//! A model folder with a chat template.

use kv_models::{Message, Model, ModelError};
use kv_testing::devices;

use super::support::embedded_folder;

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
