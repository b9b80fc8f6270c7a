//! The fields that completions and chats share, and the jobs that they make.

use std::collections::BTreeMap;

use kv_models::{Job, LogitsShaper, Request, Sampling};
use serde::Deserialize;
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::app::App;
use crate::error::{ApiError, Result};
use crate::protocol::grammar::StructuredOutputs;
use crate::shapers::{Bias, Chain, Grammar, Penalties};

/// The most log-probabilities beside a token's own.
const MOST_LOGPROBS: usize = 20;
/// The most stop strings, and the most bytes of one.
const MOST_STOPS: (usize, usize) = (16, 1024);

/// The most bytes of a context's name.
const LONGEST_NAME: usize = 64;
/// The most characters of `user` in the log.
const MOST_USER: usize = 128;

/// The lowest temperature that is not 0, and the lowest share of probability.
const COLDEST: f64 = 1e-5;

/// Fields of completions and of chats.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Common {
    /// The model's name; by default the one that is served.
    pub(crate) model: Option<String>,
    /// Whether the answer comes as server-sent events.
    pub(crate) stream: Option<bool>,
    /// What a stream tells besides text.
    pub(crate) stream_options: Option<StreamOptions>,
    /// Choices of each prompt. Each has a seed of its own: `seed`, `seed + 1` and so on.
    #[schema(minimum = 1)]
    pub(crate) n: Option<usize>,
    /// The seed of what is drawn; a random one by default.
    pub(crate) seed: Option<i64>,
    /// 0 takes the likeliest token; 1 by default.
    #[schema(minimum = 0, maximum = 2)]
    pub(crate) temperature: Option<f64>,
    /// Only the likeliest tokens that together reach this probability.
    #[schema(exclusive_minimum = 0, maximum = 1)]
    pub(crate) top_p: Option<f64>,
    /// Only the `top_k` likeliest tokens; -1 and 0 for all. Not among OpenAI's fields.
    #[schema(minimum = -1)]
    pub(crate) top_k: Option<i64>,
    /// Only tokens of at least this fraction of the likeliest one's probability. Not among OpenAI's
    /// fields.
    #[schema(minimum = 0, maximum = 1)]
    pub(crate) min_p: Option<f64>,
    /// Divides positive logits of tokens that are in the prompt or were generated. Not among
    /// OpenAI's fields.
    #[schema(minimum = 0.01, maximum = 100)]
    pub(crate) repetition_penalty: Option<f64>,
    /// Taken from a token's logit for each time that it was generated.
    #[schema(minimum = -2, maximum = 2)]
    pub(crate) frequency_penalty: Option<f64>,
    /// Taken from the logits of tokens that were generated.
    #[schema(minimum = -2, maximum = 2)]
    pub(crate) presence_penalty: Option<f64>,
    /// Numbers from -100 to 100 that are added to tokens' logits; -100 bans a token.
    pub(crate) logit_bias: Option<BTreeMap<String, f64>>,
    /// Texts at which to stop.
    pub(crate) stop: Option<Stop>,
    /// The most new tokens.
    #[schema(minimum = 1)]
    pub(crate) max_tokens: Option<usize>,
    /// Goes on after the model's end of a text. Not among OpenAI's fields.
    pub(crate) ignore_eos: Option<bool>,
    /// What the text must follow, in vLLM's form. Not among OpenAI's fields.
    pub(crate) structured_outputs: Option<StructuredOutputs>,
    /// Who asks; it is written to the log.
    pub(crate) user: Option<String>,
    /// The cache of this request: `policy`, `budget` and the policy's own options, or `context`.
    #[schema(value_type = Option<KvFields>)]
    pub(crate) kv: Option<Map<String, Value>>,
}

/// The cache of a request. Beside these, `policy` has options of its own.
#[derive(ToSchema)]
#[expect(dead_code, reason = "it stands in the API's document alone: policies read their options")]
pub(crate) struct KvFields {
    /// One of the policies of `/v1/kv/policies`; by default the operator's.
    policy: Option<String>,
    /// What is kept of the prompt: a share, such as 0.25, or a number of tokens from 1 on.
    #[schema(exclusive_minimum = 0)]
    budget: Option<f64>,
    /// The compressed context that the request continues, instead of all other fields.
    context: Option<String>,
}

/// What a stream tells besides text.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct StreamOptions {
    /// Whether the last event has the usage.
    pub(crate) include_usage: Option<bool>,
}

/// Texts at which to stop.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(untagged, expecting = "expected a text or a list of texts")]
pub(crate) enum Stop {
    /// One.
    One(String),
    /// Several.
    Several(Vec<String>),
}

/// The jobs of a request, and what is told of them.
pub(crate) struct Prepared {
    /// `n` jobs for each prompt.
    pub(crate) jobs: Vec<Job>,
    /// Choices of each prompt.
    pub(crate) choices: usize,
    pub(crate) stream: bool,
    pub(crate) include_usage: bool,
}

/// What of a request's jobs is not among the common fields.
pub(crate) struct Parts {
    /// The tokens of each prompt.
    pub(crate) prompts: Vec<Vec<u32>>,
    /// The field that the prompts came from.
    pub(crate) param: &'static str,
    /// The field that the number of new tokens came from.
    pub(crate) tokens_param: &'static str,
    /// The number of new tokens where the request gives none; `None` for what is left.
    pub(crate) default_tokens: Option<usize>,
    pub(crate) logprobs: Option<usize>,
    pub(crate) grammar: Option<Grammar>,
}

impl Common {
    /// Refuses another model's name.
    pub(crate) fn check_model(&self, app: &App) -> Result<()> {
        match &self.model {
            Some(name) if *name != app.name => {
                let message = format!("the model `{name}` is not here; there is `{}`", app.name);
                Err(ApiError::not_found("model_not_found", message).about("model"))
            }
            _ => Ok(()),
        }
    }

    /// The name of the compressed context that the request continues.
    pub(crate) fn context(&self) -> Result<Option<&str>> {
        let Some(kv) = &self.kv else { return Ok(None) };
        match kv.get("context") {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(name)) if name.len() > LONGEST_NAME => {
                let message = format!("no context has a name of {} bytes", name.len());
                Err(ApiError::not_found("context_not_found", message).about("kv.context"))
            }
            Some(Value::String(name)) => match kv.keys().find(|key| *key != "context") {
                None => Ok(Some(name)),
                Some(other) => {
                    let field = format!("kv.{other}");
                    let message = format!(
                        "`{field}` cannot be given beside `kv.context`: a context has a policy of \
                         its own"
                    );
                    Err(ApiError::invalid(field, message))
                }
            },
            Some(_) => Err(ApiError::invalid("kv.context", "a context's name was expected")),
        }
    }

    /// The jobs of some prompts.
    ///
    /// # Errors
    /// The field that is wrong.
    pub(crate) fn prepare(&self, app: &App, parts: Parts) -> Result<Prepared> {
        let choices = self.n.unwrap_or(1);
        let count = choices.saturating_mul(parts.prompts.len());
        // More choices than may wait would find the queue full whenever they came.
        let most = app.settings.max_choices.min(app.engine.options().queue);
        if choices == 0 || count > most {
            let prompts = parts.prompts.len();
            let message = format!(
                "`n` is {choices}, for each of {prompts} prompts: expected 1 to {most} choices \
                 together (`--max-choices`, `--queue`)"
            );
            return Err(ApiError::invalid(self.n.map_or(parts.param, |_| "n"), message));
        }
        if self.stream_options.is_some() && self.stream != Some(true) {
            let message = "`stream_options` needs `stream: true`";
            return Err(ApiError::invalid("stream_options", message));
        }
        let context = self.context()?;
        let mut kv = self.kv.clone().unwrap_or_default();
        // `null` is no policy and no budget, but a value of some options of policies.
        kv.retain(|key, value| match key.as_str() {
            "context" => false,
            "policy" | "budget" => !value.is_null(),
            _ => true,
        });
        let (sampling, stop) = (self.sampling()?, self.stops()?);
        if let Some(user) = &self.user {
            let user: String = user.chars().take(MOST_USER).collect();
            tracing::info!("a request of the user `{}`", user.escape_debug());
        }
        let seed = self.seed.map_or_else(rand::random, |seed| seed as u64);
        let mut jobs = Vec::with_capacity(count);
        for tokens in &parts.prompts {
            let policies = &app.settings.policies;
            let policy = policies.choose(&kv, tokens.len())?;
            policies.check_kept(&kv, &*policy, tokens.len())?;
            // Behind a context, its own policy counts. One that is not there is the engine's to
            // refuse.
            let (before, room) = match context {
                None => (0, app.engine.room_behind(tokens.len(), &*policy)),
                Some(name) => (app.engine.context_tokens(name).unwrap_or(0), None),
            };
            let new_tokens = self.new_tokens(app, [before, tokens.len()], &parts, room)?;
            for choice in 0..choices {
                let request = Request {
                    tokens: tokens.clone(),
                    question: Vec::new(),
                    new_tokens,
                    sampling: Sampling { seed: seed.wrapping_add(choice as u64), ..sampling },
                    stop: stop.clone(),
                    stop_at_end: !self.ignore_eos.unwrap_or(false),
                };
                let mut job = Job::new(request, policy.clone());
                job.context = context.map(String::from);
                job.logprobs = parts.logprobs;
                job.shaper = self.shaper(app, parts.grammar.clone())?;
                jobs.push(job);
            }
        }
        let include_usage = self.stream_options.as_ref().and_then(|o| o.include_usage);
        let stream = self.stream.unwrap_or(false);
        Ok(Prepared { jobs, choices, stream, include_usage: include_usage.unwrap_or(false) })
    }

    /// The number of new tokens behind the tokens of a context and of a prompt. Where a request
    /// names none, there are at most as many as the cache has room for.
    fn new_tokens(
        &self,
        app: &App,
        [context, prompt]: [usize; 2],
        parts: &Parts,
        room: Option<usize>,
    ) -> Result<usize> {
        let (most, positions) = (app.settings.max_tokens, app.positions());
        let param = parts.tokens_param;
        let left = positions.saturating_sub(context + prompt);
        let tokens = match context {
            0 => format!("{prompt} tokens of the prompt"),
            _ => format!("{context} tokens of the context, {prompt} of the prompt"),
        };
        if left == 0 {
            let message = format!("{tokens} do not fit into the model's {positions} positions");
            return Err(ApiError::too_long(parts.param, message));
        }
        match self.max_tokens {
            Some(0) => {
                Err(ApiError::invalid(param, format!("`{param}` is 0, expected at least 1")))
            }
            Some(count) if count > most => {
                let most = most.min(left);
                let message = format!("{count} new tokens were asked for; the most is {most}");
                Err(ApiError::invalid(param, message))
            }
            Some(count) if count > left => {
                let message = format!(
                    "{tokens} and {count} new ones do not fit into the model's {positions} \
                     positions: ask for at most {left}"
                );
                Err(ApiError::too_long(param, message))
            }
            Some(count) => Ok(count),
            None => {
                let room = room.unwrap_or(most).max(1);
                Ok(parts.default_tokens.unwrap_or(most).min(most).min(left).min(room))
            }
        }
    }

    fn sampling(&self) -> Result<Sampling> {
        let top_k = match self.top_k {
            None | Some(-1 | 0) => None,
            Some(count) => Some(usize::try_from(count).map_err(|_| {
                let message = format!("`top_k` is {count}, a number of tokens was expected, or -1");
                ApiError::invalid("top_k", message)
            })?),
        };
        let temperature = self.temperature.unwrap_or(1.0);
        in_range("temperature", temperature, 0.0..=2.0)?;
        let repetition_penalty = self.repetition_penalty.unwrap_or(1.0);
        // Logits beyond these are no numbers any more.
        in_range("repetition_penalty", repetition_penalty, 0.01..=100.0)?;
        let sampling = Sampling {
            repetition_penalty,
            // Nearly 0 is 0: a device divides in f32.
            temperature: if temperature < COLDEST { 0.0 } else { temperature },
            top_k,
            // The neutral values cost a pass over the vocabulary.
            top_p: self
                .top_p
                .filter(|p| *p != 1.0)
                .map(|p| if p > 0.0 { p.max(COLDEST) } else { p }),
            min_p: self.min_p.filter(|p| *p != 0.0),
            seed: 0,
        };
        sampling.validate()?;
        Ok(sampling)
    }

    fn stops(&self) -> Result<Vec<String>> {
        let stops = match &self.stop {
            None => return Ok(Vec::new()),
            Some(Stop::One(text)) => vec![text.clone()],
            Some(Stop::Several(texts)) => texts.clone(),
        };
        let (most, bytes) = MOST_STOPS;
        if stops.len() > most {
            let message = format!("{} texts were given, at most {most} were expected", stops.len());
            return Err(ApiError::invalid("stop", message));
        }
        if let Some(index) = stops.iter().position(|text| !(1..=bytes).contains(&text.len())) {
            let found = stops[index].len();
            let message = format!(
                "texts of 1 to {bytes} bytes were expected; number {} has {found}",
                index + 1
            );
            return Err(ApiError::invalid("stop", message));
        }
        Ok(stops)
    }

    fn shaper(&self, app: &App, grammar: Option<Grammar>) -> Result<Option<Box<dyn LogitsShaper>>> {
        let mut shapers: Vec<Box<dyn LogitsShaper>> = Vec::new();
        let frequency = self.frequency_penalty.unwrap_or(0.0);
        let presence = self.presence_penalty.unwrap_or(0.0);
        in_range("frequency_penalty", frequency, -2.0..=2.0)?;
        in_range("presence_penalty", presence, -2.0..=2.0)?;
        if (frequency, presence) != (0.0, 0.0) {
            shapers.push(Box::new(Penalties::new(frequency as f32, presence as f32)));
        }
        if let Some(bias) = self.logit_bias.as_ref().filter(|bias| !bias.is_empty()) {
            shapers.push(Box::new(Bias::new(self::bias(app, bias)?)));
        }
        if let Some(grammar) = grammar {
            shapers.push(Box::new(grammar));
        }
        Ok(Chain::of(shapers))
    }
}

/// Checks a number of the most likely tokens.
pub(crate) fn top_logprobs(param: &str, count: usize) -> Result<usize> {
    if count > MOST_LOGPROBS {
        let message = format!("`{param}` is {count}, from 0 to {MOST_LOGPROBS} was expected");
        return Err(ApiError::invalid(param, message));
    }
    Ok(count)
}

/// The tokens of `logit_bias`.
fn bias(app: &App, bias: &BTreeMap<String, f64>) -> Result<Vec<(u32, f32)>> {
    let vocabulary = app.engine.card().config.vocab_size;
    let pair = |(token, bias): (&String, &f64)| {
        let field = || format!("logit_bias.{token}");
        let known = token.parse().ok().filter(|token| (*token as usize) < vocabulary);
        let known = known.ok_or_else(|| {
            let message = format!("`{token}` is no token of the model's {vocabulary}");
            ApiError::invalid(field(), message)
        })?;
        in_range(&field(), *bias, -100.0..=100.0)?;
        Ok((known, *bias as f32))
    };
    bias.iter().map(pair).collect()
}

fn in_range(param: &str, value: f64, range: std::ops::RangeInclusive<f64>) -> Result<()> {
    if range.contains(&value) {
        return Ok(());
    }
    let (start, end) = (range.start(), range.end());
    let message = format!("`{param}` is {value}, from {start} to {end} was expected");
    Err(ApiError::invalid(param, message))
}
