//! Variable tracking: `vt` of RULER.

use std::collections::HashSet;

use rand::Rng;
use rand::seq::index;
use serde::Deserialize;

use super::fit::Fit;
use super::haystack::NOISE;
use super::{Generate, Prompt, words};
use crate::{TaskError, random};

/// Chains of variables that are assigned to each other. The first chain is asked for.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Variables {
    chains: usize,
    hops: usize,
}

/// The most tokens of the solved example.
const EXAMPLE: usize = 500;

impl Variables {
    pub(super) fn generator(&self, seed: u64, fit: &Fit<'_>) -> Result<Generator<'_>, TaskError> {
        // RULER's example has up to 500 tokens, which leaves no room in a short prompt.
        let length = EXAMPLE.min(fit.budget() / 4);
        let example = Fit { length, max_new_tokens: 0, ..*fit };
        let least = self.hops + 1;
        let example = example.greatest(least, usize::MAX, None, |size| {
            self.prompt(&mut random::stream(seed, "example", 0), size, 3, "12345")
        });
        let example = match example {
            Ok(example) => example.prompt,
            // The shortest one is taken where even that is too long for a fourth of the prompt.
            Err(TaskError::TooLong { .. }) => {
                self.prompt(&mut random::stream(seed, "example", 0), least, 3, "12345")
            }
            Err(error) => return Err(error),
        };
        Ok(Generator { variables: self, example, seed })
    }

    pub(super) fn fault(&self) -> Option<(&'static str, &'static str, String)> {
        match self.chains {
            0 => Some(("ruler.chains", "at least 1", "0".into())),
            _ if self.hops > 100 || self.chains > 100 => {
                let counts = format!("{} and {}", self.chains, self.hops);
                Some(("ruler.chains and hops", "at most 100", counts))
            }
            _ => None,
        }
    }

    /// A prompt with `size` lines of noise, and variables of `letters` letters. The first chain
    /// starts with `value`.
    fn prompt(&self, random: &mut impl Rng, size: usize, letters: usize, value: &str) -> Prompt {
        let mut used = HashSet::new();
        let mut lines = vec![NOISE.to_owned(); size];
        let mut first = Vec::new();
        for chain in 0..self.chains {
            let mut names = Vec::new();
            while names.len() <= self.hops {
                let name = words::letters(random, b'A', letters);
                if used.insert(name.clone()) {
                    names.push(name);
                }
            }
            let value = match chain {
                0 => value.to_owned(),
                _ => random.random_range(10_000..99_999_u32).to_string(),
            };
            let mut steps = vec![format!("VAR {} = {value}", names[0])];
            let hops = names.windows(2).map(|pair| format!("VAR {} = VAR {} ", pair[1], pair[0]));
            steps.extend(hops);
            let mut places = index::sample(random, lines.len(), steps.len()).into_vec();
            places.sort_unstable();
            for (inserted, (place, step)) in places.into_iter().zip(steps).enumerate() {
                lines.insert(place + inserted, step);
            }
            if chain == 0 {
                first = names;
            }
        }
        let count = self.hops + 1;
        Prompt {
            context: format!(
                "Memorize and track the chain(s) of variable assignment hidden in the following \
                 text.\n\n{}",
                lines.join("\n")
            ),
            question: format!(
                "\nQuestion: Find all variables that are assigned the value {value} in the text \
                 above."
            ),
            answer_prefix: format!(
                " Answer: According to the chain(s) of variable assignment in the text above, \
                 {count} variables are assigned the value {value}, they are: "
            ),
            references: first,
        }
    }
}

pub(super) struct Generator<'v> {
    variables: &'v Variables,
    example: Prompt,
    seed: u64,
}

impl Generate for Generator<'_> {
    fn least(&self, _question: usize) -> usize {
        self.variables.hops + 1
    }

    fn prompt(&self, question: usize, size: usize) -> Prompt {
        let mut random = random::stream(self.seed, "variables", question);
        let value = random.random_range(10_000..99_999_u32).to_string();
        let example = self.renamed(&mut random);
        let prompt = self.variables.prompt(&mut random, size, 5, &value);
        Prompt { context: format!("{example}\n{}", prompt.context), ..prompt }
    }
}

impl Generator<'_> {
    /// The solved example with other names and another value for each question.
    fn renamed(&self, random: &mut impl Rng) -> String {
        let names = self.example.references.join(" ");
        let mut text = format!("{} {names}\n", self.example.text());
        for name in &self.example.references {
            text = text.replace(name, &words::letters(random, b'A', name.len()));
        }
        text.replace("12345", &random.random_range(10_000..99_999_u32).to_string())
    }
}
