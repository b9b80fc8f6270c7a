//! `/v1/completions`.

use serde_json::{Value, json};

use super::support::{NUMBER, TEXT, bad, good, question, server, stream};

fn body(more: Value) -> Value {
    let mut body = json!({"prompt": question(), "temperature": 0, "max_tokens": 5});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

#[tokio::test]
async fn a_prompt_goes_on() {
    let server = server();
    let answer = good(&server, TEXT, body(json!({}))).await;
    assert_eq!(
        (&answer["choices"][0]["text"], &answer["object"]),
        (&json!(NUMBER), &json!("text_completion"))
    );
    let events =
        stream(&server, TEXT, body(json!({"stream_options": {"include_usage": true}}))).await;
    let text: String = events.iter().filter_map(|e| e["choices"][0]["text"].as_str()).collect();
    assert_eq!(text, NUMBER);
    assert_eq!(events.last().unwrap()["usage"]["completion_tokens"], 5);
    // Without a number, 16 tokens.
    let answer =
        good(&server, TEXT, json!({"prompt": "The sea", "temperature": 0, "ignore_eos": true}))
            .await;
    assert_eq!(answer["usage"]["completion_tokens"], 16);
}

#[tokio::test]
async fn several_prompts_and_tokens() {
    let server = server();
    let more = json!({"prompt": [question(), "The sea"], "n": 2});
    let answer = good(&server, TEXT, body(more)).await;
    let choices = answer["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 4);
    assert!(choices[..2].iter().all(|choice| choice["text"] == NUMBER));
    assert_eq!(choices[2]["index"], 2);
    let one = good(&server, TEXT, body(json!({"prompt": [50, 51, 52]}))).await;
    let two = good(&server, TEXT, body(json!({"prompt": [[50, 51, 52], [53]]}))).await;
    assert_eq!(one["choices"][0]["text"], two["choices"][0]["text"]);
    assert_eq!(one["usage"]["prompt_tokens"], 3);
}

#[tokio::test]
async fn echo_and_log_probabilities() {
    let server = server();
    let answer = good(&server, TEXT, body(json!({"echo": true}))).await;
    assert_eq!(answer["choices"][0]["text"], question() + NUMBER);
    let events = stream(&server, TEXT, body(json!({"echo": true}))).await;
    assert_eq!(events[0]["choices"][0]["text"], question());
    let answer = good(&server, TEXT, body(json!({"logprobs": 2}))).await;
    let lists = &answer["choices"][0]["logprobs"];
    for key in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        assert_eq!(lists[key].as_array().unwrap().len(), 5, "{key}");
    }
    assert_eq!(lists["text_offset"], json!([0, 1, 2, 3, 4]));
    assert_eq!(lists["top_logprobs"][0].as_object().unwrap().len(), 2);
    // The tokens of one character stand where it does.
    let more = json!({"logprobs": 1, "max_tokens": 9, "structured_outputs": {"choice": ["x🌍y"]}});
    let answer = good(&server, TEXT, body(more)).await;
    assert_eq!(answer["choices"][0]["text"], "x🌍y");
    let lists = &answer["choices"][0]["logprobs"];
    let offsets = lists["text_offset"].as_array().unwrap();
    let (last, others) = offsets.split_last().unwrap();
    assert_eq!((&others[0], last), (&json!(0), &json!(2)), "{lists}");
    assert!(others.len() > 2 && others[1..].iter().all(|own| own == 1), "{lists}");
    assert_eq!(lists["tokens"][1], "bytes:\\xf0", "{lists}");
    let error = bad(&server, TEXT, body(json!({"echo": true, "logprobs": 1})), 400).await;
    assert_eq!(error["param"], "echo");
}

#[tokio::test]
async fn prompts_that_are_none() {
    let server = server();
    for prompt in
        [json!(""), json!([]), json!([""]), json!([[]]), json!(3), json!([1, "x"]), json!([99999])]
    {
        bad(&server, TEXT, body(json!({"prompt": prompt})), 400).await;
    }
    let error = bad(&server, TEXT, json!({}), 400).await;
    assert_eq!(error["param"], "prompt");
}
