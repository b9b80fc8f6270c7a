//! What changes logits on the host before a token is drawn.
//!
//! * [`grammar`]: JSON schemas, regular expressions and grammars.
//! * [`bias`]: numbers that are added, such as `logit_bias`.
//! * [`penalties`]: `frequency_penalty` and `presence_penalty`.

mod bias;
mod grammar;
mod penalties;

use kv_models::LogitsShaper;

pub(crate) use bias::Bias;
pub(crate) use grammar::{Grammar, GrammarSource, Grammars, with_little_space};
pub(crate) use penalties::Penalties;

/// Several shapers, one after another. The grammar comes last, so that no bias allows what it
/// forbids.
pub(crate) struct Chain(Vec<Box<dyn LogitsShaper>>);

impl Chain {
    /// One shaper of several; `None` of none, so that rows without one need not wait for the host.
    pub(crate) fn of(shapers: Vec<Box<dyn LogitsShaper>>) -> Option<Box<dyn LogitsShaper>> {
        (!shapers.is_empty()).then(|| Box::new(Self(shapers)) as Box<dyn LogitsShaper>)
    }
}

impl LogitsShaper for Chain {
    fn shape(&mut self, logits: &mut [f32]) -> Result<(), String> {
        self.0.iter_mut().try_for_each(|shaper| shaper.shape(logits))
    }

    fn accept(&mut self, token: u32) -> Result<bool, String> {
        // All of them take the token, also after one that is complete.
        self.0.iter_mut().try_fold(false, |done, shaper| Ok(shaper.accept(token)? || done))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapers_apply_in_order() {
        let mut chain = Chain::of(vec![
            Box::new(Bias::new(vec![(1, 5.0)])),
            Box::new(Penalties::new(1.0, 0.5)),
        ])
        .unwrap();
        let mut logits = [0.0; 3];
        chain.shape(&mut logits).unwrap();
        assert_eq!(logits, [0.0, 5.0, 0.0]);
        assert!(!chain.accept(1).unwrap() && !chain.accept(1).unwrap());
        let mut logits = [0.0; 3];
        chain.shape(&mut logits).unwrap();
        assert_eq!(logits, [0.0, 5.0 - 2.0 - 0.5, 0.0]);
        assert!(Chain::of(Vec::new()).is_none());
    }
}
