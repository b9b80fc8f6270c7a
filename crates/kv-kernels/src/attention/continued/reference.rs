//! A softmax under way in plain loops.

use crate::components::sentinels::WEIGHTLESS_LOGIT;

/// A softmax under way, of one query head.
pub(crate) struct State {
    max: f32,
    sum: f32,
    values: Vec<f32>,
}

impl State {
    /// The state behind an attention of this output and log-sum-exp.
    pub(crate) fn of(output: &[f32], log_sum_exp: f32) -> Self {
        let none = log_sum_exp <= WEIGHTLESS_LOGIT;
        match none {
            true => Self { max: f32::MIN, sum: 0.0, values: vec![0.0; output.len()] },
            false => Self { max: log_sum_exp, sum: 1.0, values: output.to_vec() },
        }
    }

    /// Adds a slot of this logit and value.
    pub(crate) fn add(&mut self, logit: f32, value: impl Iterator<Item = f32>) {
        if logit > self.max {
            let factor = (self.max - logit).exp();
            self.sum *= factor;
            self.values.iter_mut().for_each(|value| *value *= factor);
            self.max = logit;
        }
        let weight = (logit - self.max).exp();
        self.sum += weight;
        self.values.iter_mut().zip(value).for_each(|(sum, value)| *sum += weight * value);
    }

    /// The output and the log-sum-exp.
    pub(crate) fn finish(self) -> (Vec<f32>, f32) {
        let Self { max, sum, values } = self;
        let divisor = if sum == 0.0 { 1.0 } else { sum };
        (values.into_iter().map(|value| value / divisor).collect(), max + sum.ln())
    }
}
