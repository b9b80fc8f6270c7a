//! `/v1/chat/completions`.

use kv_models::ChatTemplate;
use kv_serve::{Settings, router};
use serde_json::{Value, json};

use super::support::{
    CHAT, NUMBER, bad, chat, get, good, question, server, settings, shared, stream,
};

/// A template that takes tools, in a form that calls them by tags or by bare JSON.
pub(crate) fn with_tools(tagged: bool) -> axum::Router {
    let mark = if tagged { "<tool_call>" } else { "JSON" };
    let source = format!(
        "{{% if tools %}}Tools, by {mark}: {{{{ tools | tojson }}}}\n{{% endif %}}{{% for message \
         in messages %}}{{{{ message.role }}}}: {{{{ message.content }}}}{{% for call in \
         message.tool_calls %}}{{{{ call.function.arguments.note }}}}{{% endfor %}}\n{{% endfor %}}"
    );
    let chat_template = Some(ChatTemplate::new(source).unwrap());
    router(shared(), Settings { chat_template, ..settings() })
}

fn tool() -> Value {
    json!({"type": "function", "function": {"name": "note", "parameters": {"type": "object",
        "properties": {"note": {"enum": ["sea", "sand"]}}, "required": ["note"],
        "additionalProperties": false}}})
}

#[tokio::test]
async fn a_chat_is_answered_and_says_what_it_took() {
    let server = server();
    let answer = good(&server, CHAT, chat(&question(), json!({}))).await;
    assert_eq!(answer["choices"][0]["message"]["content"], NUMBER);
    assert_eq!(answer["choices"][0]["message"]["role"], "assistant");
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    assert_eq!(
        (&answer["object"], &answer["model"]),
        (&json!("chat.completion"), &json!("needle-1m"))
    );
    let usage = &answer["usage"];
    let number = |key: &str| usage[key].as_f64().unwrap();
    assert_eq!(number("completion_tokens"), 5.0);
    assert_eq!(number("total_tokens"), number("prompt_tokens") + 5.0);
    assert!(number("kv_tokens_kept") < 0.7 * number("total_tokens"), "{usage}");
    assert!(number("kv_bytes") > 0.0 && number("kv_bytes") < number("kv_full_bytes"), "{usage}");
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 0);
}

#[tokio::test]
async fn a_stream_says_the_same_in_pieces() {
    let server = server();
    let options = json!({"stream_options": {"include_usage": true}, "seed": 7, "temperature": 0.9,
        "max_tokens": 24});
    let events = stream(&server, CHAT, chat("The sea was", options.clone())).await;
    let (last, events) = events.split_last().unwrap();
    assert_eq!(last["choices"], json!([]));
    assert_eq!(last["usage"]["completion_tokens"], 24);
    assert_eq!(events[0]["choices"][0]["delta"]["role"], "assistant");
    assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], "length");
    let text: String =
        events.iter().filter_map(|e| e["choices"][0]["delta"]["content"].as_str()).collect();
    for event in events {
        assert_eq!(
            (&event["object"], &event["id"]),
            (&json!("chat.completion.chunk"), &events[0]["id"])
        );
        assert!(event.get("usage").is_none());
    }
    let mut body = chat("The sea was", options);
    body.as_object_mut().unwrap().remove("stream_options");
    let whole = good(&server, CHAT, body).await;
    assert_eq!(whole["choices"][0]["message"]["content"], text);
    // Without being asked, a stream tells no usage.
    let events = stream(&server, CHAT, chat("The sea was", json!({}))).await;
    assert!(events.iter().all(|event| event.get("usage").is_none()));
}

#[tokio::test]
async fn choices_have_seeds_of_their_own() {
    let server = server();
    let more = json!({"n": 3, "seed": 1, "temperature": 1.5, "max_tokens": 12});
    let answer = good(&server, CHAT, chat("The sea was", more.clone())).await;
    let texts: Vec<&Value> =
        answer["choices"].as_array().unwrap().iter().map(|c| &c["message"]["content"]).collect();
    assert_eq!(texts.len(), 3);
    assert!(texts[0] != texts[1] && texts[1] != texts[2]);
    assert_eq!(answer["usage"]["completion_tokens"], 36);
    // The prompt counts once.
    let alone = json!({"n": 1, "seed": 2, "temperature": 1.5, "max_tokens": 12});
    let alone = good(&server, CHAT, chat("The sea was", alone)).await;
    assert_eq!(alone["usage"]["prompt_tokens"], answer["usage"]["prompt_tokens"]);
    assert_eq!(&alone["choices"][0]["message"]["content"], texts[1]);
    let events = stream(&server, CHAT, chat("The sea was", more)).await;
    for (index, text) in texts.iter().enumerate() {
        let own = events.iter().map(|event| &event["choices"][0]).filter(|c| c["index"] == index);
        let own: String = own.filter_map(|choice| choice["delta"]["content"].as_str()).collect();
        assert_eq!(&json!(own), *text);
    }
}

#[tokio::test]
async fn log_probabilities_are_told() {
    let server = server();
    let more = json!({"logprobs": true, "top_logprobs": 3});
    let answer = good(&server, CHAT, chat(&question(), more.clone())).await;
    let tokens = answer["choices"][0]["logprobs"]["content"].as_array().unwrap();
    assert_eq!(tokens.len(), 5);
    let text: String = tokens.iter().map(|token| token["token"].as_str().unwrap()).collect();
    assert_eq!(text, NUMBER);
    for token in tokens {
        let top = token["top_logprobs"].as_array().unwrap();
        // Greedy tokens are the likeliest.
        assert_eq!((top.len(), &top[0]["token"]), (3, &token["token"]));
        assert_eq!(token["logprob"], top[0]["logprob"]);
        assert!(top[0]["logprob"].as_f64() >= top[1]["logprob"].as_f64());
        assert_eq!(token["bytes"], json!(token["token"].as_str().unwrap().as_bytes()));
    }
    let events = stream(&server, CHAT, chat(&question(), more)).await;
    let streamed = events.iter().filter(|event| !event["choices"][0]["logprobs"].is_null());
    assert_eq!(streamed.count(), 5);
    let none = good(&server, CHAT, chat(&question(), json!({}))).await;
    assert!(none["choices"][0]["logprobs"].is_null());
}

#[tokio::test]
async fn stops_and_characters_are_never_cut() {
    let server = server();
    let answer = good(&server, CHAT, chat(&question(), json!({"stop": "96"}))).await;
    assert_eq!(answer["choices"][0]["message"]["content"], "21");
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    let events = stream(&server, CHAT, chat(&question(), json!({"stop": ["x", "963"]}))).await;
    let shown: Vec<&str> = events
        .iter()
        .filter_map(|event| event["choices"][0]["delta"]["content"].as_str())
        .collect();
    assert_eq!(shown.concat(), "21");
    // At a high temperature the model writes single bytes of characters.
    for seed in 0..8 {
        let more = json!({"temperature": 2, "seed": seed, "max_tokens": 48});
        let body = chat("é 中 🦀", more.clone());
        let whole = good(&server, CHAT, body.clone()).await;
        let events = stream(&server, CHAT, body).await;
        let text: String = events
            .iter()
            .filter_map(|event| event["choices"][0]["delta"]["content"].as_str())
            .collect();
        assert_eq!(whole["choices"][0]["message"]["content"], text);
    }
}

#[tokio::test]
async fn sampling_follows_its_fields() {
    let server = server();
    let say = async |more: Value| {
        let answer = good(&server, CHAT, chat("The sea was", more)).await;
        answer["choices"][0]["message"]["content"].as_str().unwrap().to_string()
    };
    let greedy = say(json!({"max_tokens": 12})).await;
    let drawn = json!({"max_tokens": 12, "temperature": 1.5, "seed": 3});
    assert_ne!(say(drawn.clone()).await, greedy);
    for one in [
        json!({"top_k": 1}),
        json!({"top_p": 5e-324}),
        json!({"temperature": 5e-324}),
        json!({"min_p": 1.0}),
    ] {
        let mut more = drawn.clone();
        more.as_object_mut().unwrap().extend(one.as_object().unwrap().clone());
        assert_eq!(say(more).await, greedy, "{one}");
    }
    assert_eq!(say(json!({"max_tokens": 12, "top_k": -1, "top_p": 1.0})).await, greedy);
    // Token 0 ends a text, which no other token may here.
    let bias: serde_json::Map<String, Value> =
        [(0u32, 100)].iter().map(|(t, b)| (t.to_string(), json!(b))).collect();
    let ended = good(&server, CHAT, chat("The sea was", json!({"logit_bias": bias}))).await;
    assert_eq!(ended["choices"][0]["finish_reason"], "stop");
    assert_eq!(ended["usage"]["completion_tokens"], 0);
    let going = json!({"logit_bias": bias, "ignore_eos": true});
    let going = good(&server, CHAT, chat("The sea was", going)).await;
    assert_eq!(going["choices"][0]["finish_reason"], "length");
    // With penalties, no token comes again and again.
    let long = json!({"max_tokens": 40});
    let mut penalised = long.clone();
    penalised["frequency_penalty"] = json!(2);
    penalised["presence_penalty"] = json!(2);
    assert_ne!(say(long).await, say(penalised).await);
    let repeated = json!({"max_tokens": 40, "repetition_penalty": 5.0});
    assert_ne!(say(json!({"max_tokens": 40})).await, say(repeated).await);
}

#[tokio::test]
async fn tools_are_told_forced_and_read() {
    for tagged in [true, false] {
        let server = with_tools(tagged);
        for choice in [json!("required"), json!({"type": "function", "function": {"name": "note"}})]
        {
            let more = json!({"tools": [tool()], "tool_choice": choice, "max_tokens": 100});
            let answer = good(&server, CHAT, chat("The sea", more.clone())).await;
            let own = &answer["choices"][0];
            assert_eq!(own["finish_reason"], "tool_calls", "{answer}");
            let call = &own["message"]["tool_calls"][0];
            assert_eq!(
                (&call["type"], &call["function"]["name"]),
                (&json!("function"), &json!("note"))
            );
            let arguments = call["function"]["arguments"].as_str().unwrap();
            let arguments: Value = serde_json::from_str(arguments).unwrap();
            assert!(["sea", "sand"].contains(&arguments["note"].as_str().unwrap()));
            assert!(own["message"]["content"].is_null());
            let events = stream(&server, CHAT, chat("The sea", more)).await;
            let calls: Vec<&Value> = events
                .iter()
                .filter_map(|event| event["choices"][0]["delta"]["tool_calls"].as_array())
                .flatten()
                .collect();
            assert_eq!((calls.len(), &calls[0]["index"]), (1, &json!(0)));
            // The answer of the tool goes on.
            let body = json!({"max_tokens": 3, "tools": [tool()], "messages": [
                {"role": "user", "content": "The sea"}, own["message"],
                {"role": "tool", "tool_call_id": call["id"], "content": "calm"}]});
            good(&server, CHAT, body).await;
        }
        let none = json!({"tools": [tool()], "tool_choice": "none"});
        let with = good(&server, CHAT, chat("The sea", json!({"tools": [tool()]}))).await;
        let without = good(&server, CHAT, chat("The sea", none)).await;
        let tokens = |answer: &Value| answer["usage"]["prompt_tokens"].as_u64().unwrap();
        assert!(tokens(&with) > tokens(&without));
        let other = json!({"tools": [tool()],
            "tool_choice": {"type": "function", "function": {"name": "other"}}});
        let error = bad(&server, CHAT, chat("The sea", other), 400).await;
        assert_eq!(error["param"], "tool_choice.function.name");
    }
    // The template of a model without one takes no tools.
    let error = bad(&server(), CHAT, chat("The sea", json!({"tools": [tool()]})), 400).await;
    assert_eq!(error["param"], "tools");
    for (field, value) in [
        ("tool_choice", json!("required")),
        ("tool_choice", json!("auto")),
        ("parallel_tool_calls", json!(false)),
    ] {
        for mut body in [chat("The sea", json!({})), chat("The sea", json!({"tools": []}))] {
            body[field] = value.clone();
            let error = bad(&server(), CHAT, body, 400).await;
            assert_eq!(error["param"], field);
        }
    }
}

#[tokio::test]
async fn contents_may_have_parts() {
    let server = server();
    let parts = json!([{"type": "text", "text": "The "}, {"type": "text", "text": "sea"}]);
    let body = json!({"messages": [{"role": "developer", "content": "Be calm."},
        {"role": "user", "content": parts, "name": "Ann"}], "max_completion_tokens": 2});
    let answer = good(&server, CHAT, body).await;
    assert_eq!(answer["usage"]["completion_tokens"], 2);
    let image = json!([{"type": "image_url", "image_url": {"url": "x"}}]);
    let body = json!({"messages": [{"role": "user", "content": image}]});
    let error = bad(&server, CHAT, body, 400).await;
    assert_eq!(error["param"], "messages[0].content[0].type");
    let more = json!([{"type": "text", "text": "x"}, {"type": "text", "text": "x", "tone": 1}]);
    let body = json!({"messages": [{"role": "user", "content": more}]});
    let error = bad(&server, CHAT, body, 400).await;
    assert_eq!(
        (&error["param"], &error["code"]),
        (&json!("messages[0].content[1].tone"), &json!("unsupported_parameter"))
    );
}

#[tokio::test]
async fn variables_of_the_template_are_read_or_refused() {
    let template = "{{ tone }}{% for message in messages %}{{ message.content }}{% endfor %}";
    let chat_template = Some(ChatTemplate::new(template).unwrap());
    let server = router(shared(), Settings { chat_template, ..settings() });
    let tokens = async |tone: &str| {
        let more = json!({"chat_template_kwargs": {"tone": tone}});
        let answer = good(&server, CHAT, chat("The sea", more)).await;
        answer["usage"]["prompt_tokens"].as_u64().unwrap()
    };
    assert!(tokens("Calm as it was").await > tokens("").await);
    let more = json!({"chat_template_kwargs": {"add_generation_prompt": false}});
    let error = bad(&server, CHAT, chat("Hello.", more), 400).await;
    assert_eq!(error["param"], "chat_template_kwargs.add_generation_prompt");
    let more = json!({"chat_template_kwargs": {"tone": "x", "enable_thinking": true}});
    let error = bad(&server, CHAT, chat("The sea", more), 400).await;
    assert_eq!(
        (&error["param"], &error["code"]),
        (&json!("chat_template_kwargs.enable_thinking"), &json!("unsupported_parameter"))
    );
}

#[tokio::test]
async fn models_are_listed() {
    let server = server();
    let (_, models) = get(&server, "/v1/models").await;
    assert_eq!(
        (&models["data"][0]["id"], &models["object"]),
        (&json!("needle-1m"), &json!("list"))
    );
    let (_, model) = get(&server, "/v1/models/needle-1m").await;
    assert_eq!(model["max_model_len"], 2048);
    assert_eq!(model["max_tokens"], settings().max_tokens);
    let (status, answer) = get(&server, "/v1/models/org/other").await;
    assert_eq!((status.as_u16(), &answer["error"]["code"]), (404, &json!("model_not_found")));
}
