//! Dynamo's requests as bodies of `/v1/completions`, which `kv-serve` reads.

use std::collections::HashSet;

use dynamo_backend_common::{GuidedDecodingOptions, PreprocessedRequest};
use serde_json::{Map, Value, json};

use crate::error::RequestError;

type Result<T> = std::result::Result<T, RequestError>;

/// What an annotation begins with that says how the request's cache is compressed.
const KV: &str = "kv:";

/// What a worker allows.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// The most tokens of a sequence.
    pub(crate) positions: usize,
    /// The most new tokens.
    pub(crate) max_tokens: usize,
    /// Whether prompts that begin alike share keys and values.
    pub(crate) shares_prefixes: bool,
}

/// What a request asks for.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Asked {
    /// The body of a completion.
    pub(crate) body: Map<String, Value>,
    /// Texts at which the engine stops.
    pub(crate) stop: Vec<String>,
    /// Tokens behind which the answer ends.
    pub(crate) ends: HashSet<u32>,
}

/// Reads a request.
///
/// # Errors
/// The field that is wrong, or that this worker does not honour.
pub(crate) fn read(request: &PreprocessedRequest, limits: Limits) -> Result<Asked> {
    refuse(&unsupported(request, limits))?;
    let (sampling, stops) = (&request.sampling_options, &request.stop_conditions);
    let logprobs = request.output_options.logprobs;
    let mut body = Map::new();
    let mut put = |name: &str, value: Value| {
        // Fields that were not given are left out, so that they have their defaults.
        if !value.is_null() {
            body.insert(name.to_string(), value);
        }
    };
    put("prompt", json!(*request.token_ids));
    put("max_tokens", json!(new_tokens(request, limits)));
    put("temperature", json!(sampling.temperature));
    put("top_p", json!(sampling.top_p));
    put("top_k", json!(sampling.top_k));
    put("min_p", json!(sampling.min_p));
    put("repetition_penalty", json!(sampling.repetition_penalty));
    put("frequency_penalty", json!(sampling.frequency_penalty));
    put("presence_penalty", json!(sampling.presence_penalty));
    put("seed", json!(sampling.seed));
    put("logprobs", json!(logprobs));
    put("ignore_eos", json!(stops.ignore_eos));
    put("structured_outputs", structured(sampling.guided_decoding.as_ref())?);
    put("kv", cache(&request.annotations)?);
    // With log-probabilities, an engine that knows a stop string tells nothing of the tokens that
    // it took. The front end, which looks for stop strings too, needs the text before them.
    let stop = stops.stop.clone().filter(|_| logprobs.is_none()).unwrap_or_default();
    let ends = [&stops.stop_token_ids, &stops.stop_token_ids_visible, &stops.stop_token_ids_hidden];
    let ends = ends.into_iter().flatten().flatten().copied().collect();
    Ok(Asked { body, stop, ends })
}

/// Fields that this worker does not honour, and whether a request has them.
fn unsupported(request: &PreprocessedRequest, limits: Limits) -> Vec<(&'static str, bool)> {
    let (sampling, stops) = (&request.sampling_options, &request.stop_conditions);
    let routing = request.routing.as_ref();
    let extra = |name: &str| {
        let options = request.extra_args.as_ref().and_then(|extra| extra.get("sampling_options"));
        options.and_then(|options| options.get(name)).is_some_and(|value| !value.is_null())
    };
    let has_media = request.multi_modal_data.as_ref().is_some_and(|media| !media.is_empty());
    let is_several = |number: Option<u8>| number.is_some_and(|number| number > 1);
    // A sequence that does not end by itself has all of its tokens.
    let least = stops.min_tokens.filter(|_| stops.ignore_eos != Some(true));
    let guided = sampling.guided_decoding.as_ref();
    let has_guided = |has: fn(&GuidedDecodingOptions) -> bool| guided.is_some_and(has);
    // Prompts of other salts would be found among the kept ones.
    let salt = routing.and_then(|routing| routing.cache_namespace.as_ref());
    vec![
        ("n", is_several(sampling.n)),
        ("best_of", is_several(sampling.best_of)),
        ("use_beam_search", sampling.use_beam_search == Some(true)),
        ("length_penalty", sampling.length_penalty.is_some_and(|penalty| penalty != 1.0)),
        ("min_tokens", least.is_some_and(|least| least > 0)),
        ("max_thinking_tokens", stops.max_thinking_tokens.is_some()),
        ("prompt_logprobs", request.output_options.prompt_logprobs.is_some()),
        ("guided_decoding.backend", has_guided(|guided| guided.backend.is_some())),
        (
            "guided_decoding.whitespace_pattern",
            has_guided(|guided| guided.whitespace_pattern.is_some()),
        ),
        ("guided_decoding.structural_tag", has_guided(|guided| guided.structural_tag.is_some())),
        ("allowed_token_ids", extra("allowed_token_ids")),
        ("bad_words_token_ids", extra("bad_words_token_ids")),
        ("logprob_token_ids", extra("logprob_token_ids")),
        ("multi_modal_data", has_media),
        ("prompt_embeds", request.prompt_embeds.is_some()),
        ("lora_name", routing.is_some_and(|routing| routing.lora_name.is_some())),
        ("cache_salt", limits.shares_prefixes && salt.is_some()),
        ("prefill_result", request.prefill_result.is_some()),
        ("bootstrap_info", request.bootstrap_info.is_some()),
        ("encoder_result", request.encoder_result.is_some()),
    ]
}

fn refuse(fields: &[(&'static str, bool)]) -> Result<()> {
    match fields.iter().find(|(_, is_there)| *is_there) {
        Some(&(field, _)) => Err(RequestError::Unsupported { field }),
        None => Ok(()),
    }
}

/// The number of new tokens, at least one, so that a prompt without room is refused by its length.
fn new_tokens(request: &PreprocessedRequest, limits: Limits) -> usize {
    let left = limits.positions.saturating_sub(request.token_ids.len());
    let asked = request.stop_conditions.max_tokens.map_or(usize::MAX, |count| count as usize);
    asked.min(limits.max_tokens).min(left.max(1))
}

/// What the text must follow, in vLLM's form.
fn structured(guided: Option<&GuidedDecodingOptions>) -> Result<Value> {
    let Some(guided) = guided else { return Ok(Value::Null) };
    let schema = match &guided.json {
        Some(Value::String(text)) => {
            let parsed = serde_json::from_str(text);
            Some(parsed.map_err(|error| RequestError::Invalid {
                field: "guided_decoding.json",
                reason: error.to_string(),
            })?)
        }
        other => other.clone(),
    };
    let choice = guided.choice.as_ref().filter(|choice| !choice.is_empty());
    let fields = [
        ("json", schema),
        ("regex", guided.regex.as_ref().map(|regex| json!(regex))),
        ("choice", choice.map(|choice| json!(choice))),
        ("grammar", guided.grammar.as_ref().map(|grammar| json!(grammar))),
    ];
    let given = fields.into_iter().filter_map(|(name, value)| Some((name.to_string(), value?)));
    let given: Map<String, Value> = given.collect();
    Ok(if given.is_empty() { Value::Null } else { Value::Object(given) })
}

/// The policy, the budget and the policy's options: a JSON object in an annotation. Dynamo passes
/// no unknown fields of a body on, but it passes annotations.
fn cache(annotations: &[String]) -> Result<Value> {
    let invalid = |reason: String| RequestError::Invalid { field: "kv", reason };
    let mut found = annotations.iter().filter_map(|annotation| annotation.strip_prefix(KV));
    let Some(text) = found.next() else { return Ok(Value::Null) };
    if found.next().is_some() {
        return Err(invalid("there are several annotations `kv:`".into()));
    }
    let map: Map<String, Value> =
        serde_json::from_str(text).map_err(|error| invalid(format!("a JSON object: {error}")))?;
    // Contexts belong to one worker, and requests go to any.
    refuse(&[("kv.context", map.contains_key("context"))])?;
    Ok(Value::Object(map))
}

#[cfg(test)]
mod tests {
    use dynamo_backend_common::{OutputOptions, SamplingOptions, StopConditions};

    use super::*;

    const LIMITS: Limits = Limits { positions: 100, max_tokens: 50, shares_prefixes: false };

    /// A request with some of its fields given as JSON.
    fn request(fields: Value) -> PreprocessedRequest {
        let request = PreprocessedRequest::builder()
            .model("needle-1m".to_string())
            .token_ids(vec![1, 2, 3])
            .stop_conditions(StopConditions::default())
            .sampling_options(SamplingOptions::default())
            .output_options(OutputOptions::default())
            .build()
            .unwrap();
        let mut whole = serde_json::to_value(request).unwrap();
        for (name, value) in fields.as_object().unwrap() {
            match (whole.get_mut(name).and_then(Value::as_object_mut), value.as_object()) {
                (Some(own), Some(more)) => own.extend(more.clone()),
                _ => whole[name] = value.clone(),
            }
        }
        serde_json::from_value(whole).unwrap()
    }

    fn body(fields: Value) -> Value {
        Value::Object(read(&request(fields), LIMITS).unwrap().body)
    }

    #[test]
    fn what_was_not_given_is_left_out() {
        assert_eq!(body(json!({})), json!({"prompt": [1, 2, 3], "max_tokens": 50}));
    }

    #[test]
    fn fields_have_their_names_in_completions() {
        let asked = json!({
            "sampling_options": {"temperature": 0.5, "top_p": 0.5, "top_k": 7, "min_p": 0.25,
                "seed": 9, "repetition_penalty": 1.5, "frequency_penalty": 0.5,
                "presence_penalty": -0.5, "n": 1, "best_of": 1,
                "guided_decoding": {"choice": ["a", "b"]}},
            "stop_conditions": {"max_tokens": 8, "ignore_eos": true, "min_tokens": 8},
            "output_options": {"logprobs": 2},
            "annotations": ["request_id", "kv:{\"policy\": \"h2o\", \"budget\": 8}"],
        });
        let expected = json!({
            "prompt": [1, 2, 3], "max_tokens": 8, "temperature": 0.5, "top_p": 0.5, "top_k": 7,
            "min_p": 0.25, "seed": 9, "repetition_penalty": 1.5, "frequency_penalty": 0.5,
            "presence_penalty": -0.5, "ignore_eos": true, "logprobs": 2,
            "structured_outputs": {"choice": ["a", "b"]}, "kv": {"policy": "h2o", "budget": 8},
        });
        assert_eq!(body(asked), expected);
    }

    #[test]
    fn schemas_may_be_texts() {
        for schema in [json!({"type": "object"}), json!("{\"type\": \"object\"}")] {
            let guided = json!({"sampling_options": {"guided_decoding": {"json": schema}}});
            assert_eq!(body(guided)["structured_outputs"], json!({"json": {"type": "object"}}));
        }
    }

    #[test]
    fn answers_end_at_the_limits() {
        for (asked, given) in [(None, 50), (Some(5), 5), (Some(60), 50), (Some(10_000), 50)] {
            let body = body(json!({"stop_conditions": {"max_tokens": asked}}));
            assert_eq!(body["max_tokens"], json!(given), "{asked:?}");
        }
        let long = read(&request(json!({"token_ids": vec![1; 90]})), LIMITS).unwrap();
        assert_eq!(long.body["max_tokens"], json!(10));
    }

    #[test]
    fn stops_of_all_kinds_end_an_answer() {
        let stops = json!({"stop": ["x"], "stop_token_ids": [4], "stop_token_ids_hidden": [5, 6],
            "stop_token_ids_visible": [7]});
        let asked = read(&request(json!({"stop_conditions": stops})), LIMITS).unwrap();
        assert_eq!((asked.stop, asked.ends), (vec!["x".to_string()], HashSet::from([4, 5, 6, 7])));
        let logprobs =
            json!({"stop_conditions": {"stop": ["x"]}, "output_options": {"logprobs": 0}});
        assert!(read(&request(logprobs), LIMITS).unwrap().stop.is_empty());
    }

    #[test]
    fn what_is_not_honoured_is_refused_by_name() {
        let media = json!({"image_url": [{"Url": "data:,"}]});
        for (fields, name) in [
            (json!({"sampling_options": {"n": 2}}), "n"),
            (json!({"sampling_options": {"best_of": 2}}), "best_of"),
            (json!({"sampling_options": {"use_beam_search": true}}), "use_beam_search"),
            (json!({"sampling_options": {"length_penalty": 0.5}}), "length_penalty"),
            (json!({"stop_conditions": {"min_tokens": 2}}), "min_tokens"),
            (json!({"stop_conditions": {"max_thinking_tokens": 2}}), "max_thinking_tokens"),
            (json!({"output_options": {"prompt_logprobs": 2}}), "prompt_logprobs"),
            (
                json!({"sampling_options": {"guided_decoding": {"regex": "a", "backend": "b"}}}),
                "guided_decoding.backend",
            ),
            (
                json!({"extra_args": {"sampling_options": {"allowed_token_ids": [1]}}}),
                "allowed_token_ids",
            ),
            (json!({"multi_modal_data": media}), "multi_modal_data"),
            (json!({"prompt_embeds": "AA=="}), "prompt_embeds"),
            (json!({"routing": {"lora_name": "own"}}), "lora_name"),
            (json!({"annotations": ["kv:{\"context\": \"book\"}"]}), "kv.context"),
        ] {
            let error = read(&request(fields), LIMITS).unwrap_err();
            let RequestError::Unsupported { field } = error else { panic!("{error}") };
            assert_eq!(field, name);
        }
        let salted = request(json!({"routing": {"cache_salt": "own"}}));
        assert!(read(&salted, LIMITS).is_ok());
        let error = read(&salted, Limits { shares_prefixes: true, ..LIMITS }).unwrap_err();
        assert_eq!(error, RequestError::Unsupported { field: "cache_salt" });
        for annotations in [json!(["kv:h2o"]), json!(["kv:{}", "kv:{}"])] {
            let error = read(&request(json!({"annotations": annotations})), LIMITS).unwrap_err();
            assert!(matches!(error, RequestError::Invalid { field: "kv", .. }), "{error}");
        }
    }
}
