//! Batches of texts with masked words.

use drumline::torch::TorchError;
use drumline::trainer::{Batch, Supervised};
use tch::{Device, Tensor};

/// A batch. Its targets are the words at the masked places in one row. Logits are computed for these only, and
/// [`WordLoss`](crate::words::WordLoss) counts no others.
#[derive(Debug)]
pub struct MaskedBatch {
    /// Tokens with masks `[texts, places]`.
    pub tokens: Tensor,
    /// Token types `[texts, places]`: 0 for the first text, 1 for the second.
    pub types: Tensor,
    /// The masked places, as indices into the flattened `tokens`.
    pub places: Tensor,
    /// The original words at these places.
    pub words: Tensor,
}

impl MaskedBatch {
    /// What the first of [`layers`](super::layers) gets.
    pub fn inputs(&self) -> Vec<Tensor> {
        [&self.tokens, &self.types, &self.places].map(Tensor::shallow_clone).into()
    }
}

impl Batch for MaskedBatch {
    fn num_samples(&self) -> usize {
        self.tokens.size()[0] as usize
    }

    fn to_device(self, device: Device) -> Result<Self, TorchError> {
        let Self { tokens, types, places, words } = self;
        let [tokens, types] = [tokens.f_to_device(device)?, types.f_to_device(device)?];
        Ok(Self { tokens, types, places: places.f_to_device(device)?, words: words.f_to_device(device)? })
    }

    fn tensors(&self) -> Option<Vec<&Tensor>> {
        Some(vec![&self.tokens, &self.types, &self.places, &self.words])
    }
}

impl Supervised for MaskedBatch {
    fn input(&self) -> &Tensor {
        &self.tokens
    }

    fn target(&self) -> &Tensor {
        &self.words
    }
}
