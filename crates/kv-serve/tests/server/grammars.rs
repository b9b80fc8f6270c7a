//! Texts that follow JSON schemas and grammars.

use serde_json::{Value, json};

use super::support::{CHAT, TEXT, bad, chat, good, post, server, stream};

fn schema() -> Value {
    json!({"type": "object", "properties": {"where": {"enum": ["sea", "sand"]},
        "when": {"type": "boolean"}, "boats": {"type": "array", "items": {"type": "integer",
        "minimum": 0, "maximum": 9}, "minItems": 2, "maxItems": 2}},
        "required": ["where", "when", "boats"], "additionalProperties": false})
}

fn said(answer: &Value) -> String {
    assert_eq!(answer["choices"][0]["finish_reason"], "stop", "{answer}");
    answer["choices"][0]["message"]["content"].as_str().unwrap().to_string()
}

#[tokio::test]
async fn answers_follow_a_schema() {
    let server = server();
    let format = json!({"type": "json_schema", "json_schema": {"name": "place", "strict": true,
        "schema": schema()}});
    for seed in 0..4 {
        let more = json!({"response_format": format, "max_tokens": 200, "temperature": 1.5,
            "seed": seed});
        let text = said(&good(&server, CHAT, chat("The sea", more.clone())).await);
        let value: Value = serde_json::from_str(&text).unwrap();
        assert!(["sea", "sand"].contains(&value["where"].as_str().unwrap()), "{text}");
        assert!(value["when"].is_boolean() && value["boats"].as_array().unwrap().len() == 2);
        // Fields come in the schema's order.
        let places = ["where", "when", "boats"].map(|key| text.find(key).unwrap());
        assert!(places.is_sorted(), "{text}");
        let events = stream(&server, CHAT, chat("The sea", more)).await;
        let streamed: String = events
            .iter()
            .filter_map(|event| event["choices"][0]["delta"]["content"].as_str())
            .collect();
        assert_eq!(streamed, text);
    }
    let more = json!({"response_format": {"type": "json_object"}, "max_tokens": 30});
    let answer = good(&server, CHAT, chat("The sea", more)).await;
    assert!(answer["choices"][0]["message"]["content"].as_str().unwrap().starts_with('{'));
    good(&server, CHAT, chat("The sea", json!({"response_format": {"type": "text"}}))).await;
}

#[tokio::test]
async fn answers_follow_other_grammars() {
    let server = server();
    let say = async |structured: Value| {
        let more = json!({"structured_outputs": structured, "max_tokens": 60, "temperature": 1.2,
            "seed": 5});
        said(&good(&server, CHAT, chat("The sea", more)).await)
    };
    assert!(
        ["calm", "\"wild\" é"]
            .contains(&say(json!({"choice": ["calm", "\"wild\" é"]})).await.as_str())
    );
    let number = say(json!({"regex": "[1-9][0-9]{3}-[a-c]"})).await;
    assert!(number.len() == 6 && number.ends_with(['a', 'b', 'c']), "{number}");
    let lark = "start: \"a boat\" (\" and a boat\"){2}";
    assert_eq!(say(json!({"grammar": lark})).await, "a boat and a boat and a boat");
    let value: Value = serde_json::from_str(&say(json!({"json": schema()})).await).unwrap();
    assert!(value["when"].is_boolean());
    let body = json!({"prompt": "The sea", "structured_outputs": {"choice": ["calm"]}});
    assert_eq!(good(&server, TEXT, body).await["choices"][0]["text"], "calm");
    // No bias allows what a grammar forbids, and a choice keeps to it with others beside it.
    let more = json!({"structured_outputs": {"choice": ["calm"]}, "n": 2, "max_tokens": 9,
        "logit_bias": {"50": 100}, "logprobs": true});
    let answer = good(&server, CHAT, chat("The sea", more)).await;
    assert_eq!(answer["choices"][1]["message"]["content"], "calm");
}

#[tokio::test]
async fn choices_may_be_many() {
    let server = server();
    let texts: Vec<String> = (0..3000).map(|number| format!("the {number}th choice")).collect();
    let more = json!({"structured_outputs": {"choice": texts}, "max_tokens": 30,
        "temperature": 1.5, "seed": 3});
    let text = said(&good(&server, CHAT, chat("The sea", more)).await);
    assert!(texts.contains(&text), "{text}");
}

#[tokio::test]
async fn wrong_grammars_are_named() {
    let server = server();
    let format = |schema: Value| {
        json!({"response_format": {"type": "json_schema",
            "json_schema": {"name": "x", "schema": schema}}})
    };
    for (more, param) in [
        (format(json!({"type": "nothing"})), "response_format.json_schema.schema"),
        (format(json!({"type": "string", "pattern": "("})), "response_format.json_schema.schema"),
        (format(json!(3)), "response_format.json_schema.schema"),
        (json!({"response_format": {"type": "json_schema"}}), "response_format"),
        (
            json!({"response_format": {"type": "json_schema", "json_schema": {}}}),
            "response_format.json_schema.name",
        ),
        (
            json!({"response_format": {"type": "json_schema",
                "json_schema": {"name": "x", "schemma": {}}}}),
            "response_format.json_schema.schemma",
        ),
        (json!({"structured_outputs": {"regex": "("}}), "structured_outputs.regex"),
        (json!({"structured_outputs": {"grammar": "begin: x"}}), "structured_outputs.grammar"),
        (json!({"structured_outputs": {"choice": []}}), "structured_outputs.choice"),
        (json!({"structured_outputs": {}}), "structured_outputs"),
        (json!({"structured_outputs": {"regex": "a", "choice": ["b"]}}), "structured_outputs"),
        (
            json!({"structured_outputs": {"regex": "a"},
                "response_format": {"type": "json_object"}}),
            "structured_outputs.regex",
        ),
    ] {
        let error = bad(&server, CHAT, chat("x", more.clone()), 400).await;
        assert!(error["param"].as_str().unwrap().starts_with(param), "{more}: {error}");
    }
}

/// A schema whose definitions refer to each other in a chain.
fn chain(length: usize, link: impl Fn(Value) -> Value) -> Value {
    let name = |at: usize| format!("a{at}");
    let refer = |at: usize| json!({"$ref": format!("#/$defs/{}", name(at))});
    let mut definitions: serde_json::Map<String, Value> =
        (0..length).map(|at| (name(at), link(refer(at + 1)))).collect();
    definitions.insert(name(length), json!({"type": "integer"}));
    json!({"$ref": "#/$defs/a0", "$defs": definitions})
}

#[tokio::test]
async fn references_may_be_recursive() {
    let server = server();
    let list = json!({"$ref": "#/$defs/node", "$defs": {"node": {"type": "object",
        "properties": {"next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}},
        "required": ["next"], "additionalProperties": false}}});
    let more = json!({"structured_outputs": {"json": list}, "max_tokens": 200, "temperature": 1.5,
        "seed": 3});
    let text = said(&good(&server, CHAT, chat("The sea", more)).await);
    assert!(serde_json::from_str::<Value>(&text).unwrap()["next"].is_null() || text.len() > 14);
    let name = |at: usize| json!({"$ref": format!("#/$defs/{}", ["a", "b"][at])});
    for schema in [
        json!({"$ref": "#"}),
        json!({"$ref": "#/$defs/a", "$defs": {"a": name(1), "b": name(0)}}),
        json!({"allOf": [{"$ref": "#"}]}),
    ] {
        let more = json!({"structured_outputs": {"json": schema}});
        let error = bad(&server, CHAT, chat("x", more), 400).await;
        assert_eq!(error["param"], "structured_outputs.json");
        assert!(error["message"].as_str().unwrap().contains("leads to itself"), "{error}");
    }
}

/// References are followed by recursion, which must not end the process.
#[tokio::test]
async fn long_chains_of_references_do_no_harm() {
    let server = server();
    let ask = async |structured: Value| {
        let more = json!({"structured_outputs": structured, "max_tokens": 3});
        let (status, answer) = post(&server, CHAT, chat("x", more)).await;
        assert!([200, 400].contains(&status.as_u16()), "{answer}");
        (status.as_u16(), answer)
    };
    let json = |schema: Value| json!({"json": schema});
    assert_eq!(ask(json(chain(2000, |next| next))).await.0, 200);
    ask(json(chain(1500, |next| json!({"type": "array", "items": next})))).await;
    ask(json(chain(1500, |next| json!({"anyOf": [next, {"type": "integer"}]})))).await;
    ask(json(chain(1500, |next| json!({"allOf": [next, {"type": "integer"}]})))).await;
    let rules = |start: &str, link: &str| {
        let rules = (0..900).map(|at| format!("{start}{at}: {link}{start}{}\n", at + 1));
        let rules: String = rules.collect();
        json!({"grammar": format!("start: {start}0\n{rules}{start}900: \"b\"\n")})
    };
    for (start, link) in [("r", ""), ("r", "\"a\" "), ("T", ""), ("T", "\"a\" ")] {
        ask(rules(start, link)).await;
    }
    for (name, text) in [("regex", "a?".repeat(9000)), ("grammar", "start: \"a\" ".repeat(2000))] {
        let (status, answer) = ask(json!({name: text})).await;
        let message = answer["error"]["message"].as_str().unwrap();
        assert!(status == 400 && message.contains("the most is 16384"), "{answer}");
    }
    let (status, answer) = ask(json(chain(8000, |next| next))).await;
    let message = answer["error"]["message"].as_str().unwrap();
    assert!(status == 400 && message.contains("the most is 131072"), "{answer}");
}
