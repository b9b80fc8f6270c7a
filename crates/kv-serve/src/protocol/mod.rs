//! From a request's body to jobs of the engine, and from what the engine says to answers.
//!
//! * [`fields`]: bodies, of which each field is known or refused by name.
//! * [`common`]: the fields that completions and chats share, and the jobs that they make.
//! * [`chat`], [`completion`]: the fields of their own.
//! * [`grammar`]: what a text must follow.
//! * [`tools`]: tools that a model may call.
//! * [`answer`]: the bodies of answers.
//! * [`logprobs`]: log-probabilities in both of OpenAI's forms.

pub(crate) mod answer;
pub(crate) mod chat;
pub(crate) mod common;
pub(crate) mod completion;
pub(crate) mod fields;
pub(crate) mod grammar;
pub(crate) mod logprobs;
pub(crate) mod tools;
