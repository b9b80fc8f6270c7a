//! Gradients of the key and value projections, by Burn's automatic differentiation.

use burn::tensor::{Gradients, Tensor};
use kv_kernels::device_work;

use super::Llama;
use super::plain::Plain;
use crate::{ModelError, Result};

/// What a window of text says of the key and value projections.
#[derive(Debug, Clone)]
pub struct KvGradients {
    /// Mean negative log-likelihood of the window's tokens behind the first, in nats, `[1]`, f32.
    pub loss: Tensor<1>,
    /// For each layer, the loss's gradients with respect to the weights of keys and of values, each
    /// `[Hkv * D, hidden]`, f32, on the model's device.
    pub layers: Vec<[Tensor<2>; 2]>,
}

impl Llama {
    /// Gradients of a window's mean negative log-likelihood with respect to the weights of keys and
    /// values, in f32 whatever the model's dtype.
    ///
    /// One layer is differentiated at a time, so that beside the gradients themselves only every
    /// layer's input `[T, hidden]` and one layer's activations (its attention `[Hq, T, T]` among
    /// them) and f32 weights are held.
    ///
    /// # Errors
    /// [`ModelError::WholeModelOnly`], [`ModelError::EmptyPrompt`] below two tokens,
    /// [`ModelError::PromptTooLong`], [`ModelError::TokenOutOfRange`].
    pub fn kv_gradients(&self, tokens: &[u32]) -> Result<KvGradients> {
        self.check_whole("a gradient")?;
        self.check_prompt(tokens)?;
        let count = tokens.len() - 1;
        if count == 0 {
            return Err(ModelError::EmptyPrompt);
        }
        let _work = device_work();
        let plain = Plain::new(self, count);
        let mut hidden = plain.embed(self.upload(&tokens[..count]));
        let mut inputs = Vec::with_capacity(self.layers.len());
        for layer in &self.layers {
            inputs.push(hidden.clone());
            hidden = plain.layer(layer, hidden, plain.key_value_weights(layer));
        }

        let hidden = leaf(hidden);
        let loss = plain.loss(hidden.clone(), self.upload(&tokens[1..]));
        let mut above = gradient(&hidden, &mut loss.backward());
        let mut layers = Vec::with_capacity(inputs.len());
        for (layer, input) in self.layers.iter().zip(inputs).rev() {
            let input = leaf(input);
            let weights = plain.key_value_weights(layer).map(leaf);
            let output = plain.layer(layer, input.clone(), weights.clone());
            // Has the gradients that the loss has, given the loss's with respect to the output.
            let mut gradients = (output * above).sum().backward();
            layers.push(weights.map(|weight| gradient(&weight, &mut gradients)));
            above = gradient(&input, &mut gradients);
        }
        layers.reverse();
        Ok(KvGradients { loss: loss.without_autodiff(), layers })
    }
}

/// A tensor whose gradient is asked for.
fn leaf(tensor: Tensor<2>) -> Tensor<2> {
    tensor.autodiff().require_grad()
}

/// Its gradient; zero where nothing depends on it.
fn gradient(leaf: &Tensor<2>, gradients: &mut Gradients) -> Tensor<2> {
    let found = leaf.grad_remove(gradients);
    found.unwrap_or_else(|| leaf.clone().without_autodiff().zeros_like())
}

#[cfg(test)]
mod tests;
