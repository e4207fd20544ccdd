//! Generates text token by token, each sampled from the model's distribution.
//!
//! A model sees at most `n_positions` tokens. When the window is full, only its later half is kept, so the cache is
//! recomputed once per half window.

use std::ops::ControlFlow;

use drumline_text::TokenSampler;
use tch::{Kind, Tensor, no_grad};

use crate::error::ZooError;
use crate::models::gpt::{Gpt, KvCache};

/// Whether the keys and values of earlier tokens are cached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Caching {
    /// A new token computes only its own position.
    #[default]
    On,
    /// All positions are recomputed for each token, for comparison.
    Off,
}

/// Continues texts.
#[derive(Debug)]
pub struct Generator<'a> {
    /// The model.
    pub model: &'a Gpt,
    /// The token that ends a text.
    pub end_of_text: u32,
    /// The largest number of new tokens.
    pub max_tokens: usize,
    /// Whether keys and values are cached.
    pub caching: Caching,
}

impl Generator<'_> {
    /// Calls `each` with every new token after `prompt`, until the text ends, `each` breaks, or the limit is reached.
    /// An empty prompt starts a new text.
    pub fn generate(
        &self,
        prompt: &[u32],
        sampler: &mut TokenSampler,
        mut each: impl FnMut(u32) -> ControlFlow<()>,
    ) -> Result<(), ZooError> {
        self.check(prompt)?;
        let mut tokens: Vec<i64> = prompt.iter().map(|token| i64::from(*token)).collect();
        if tokens.is_empty() {
            tokens.push(i64::from(self.end_of_text));
        }
        let mut state = State { cache: self.model.cache(), start: 0 };
        for _ in 0..self.max_tokens {
            let logits = no_grad(|| state.next(self, &tokens));
            let token = sampler.pick(&logits) as u32;
            if token == self.end_of_text || each(token).is_break() {
                break;
            }
            tokens.push(i64::from(token));
        }
        Ok(())
    }

    fn check(&self, prompt: &[u32]) -> Result<(), ZooError> {
        let words = self.model.options().vocab_size;
        if i64::from(self.end_of_text) >= words {
            return Err(ZooError::Unsuitable {
                what: format!(
                    "the end-of-text token is {}, but the model has {words} tokens",
                    self.end_of_text
                ),
                fix: "the tokenizer that it was trained with, or its eos_token_id in config.json".into(),
            });
        }
        match prompt.iter().find(|token| i64::from(**token) >= words) {
            Some(token) => Err(ZooError::Unsuitable {
                what: format!("the prompt has token {token}, but the model has {words} tokens"),
                fix: "the tokenizer that it was trained with".into(),
            }),
            None => Ok(()),
        }
    }
}

/// The state of one text.
struct State {
    cache: KvCache,
    /// The first token that the model sees.
    start: usize,
}

impl State {
    /// The logits of the next token, without padding rows.
    fn next(&mut self, generator: &Generator<'_>, tokens: &[i64]) -> Vec<f32> {
        let Generator { model, caching, .. } = generator;
        let start = first_seen(tokens.len(), model.options().n_positions as usize);
        if start != self.start || *caching == Caching::Off {
            (self.cache, self.start) = (model.cache(), start);
        }
        let new = &tokens[start + self.cache.len() as usize..];
        let new = Tensor::from_slice(new).unsqueeze(0).to_device(model.device());
        let logits = model.next(&new, &mut self.cache).narrow(1, 0, model.options().vocab_size);
        let mut out = vec![0f32; logits.numel()];
        logits.to_kind(Kind::Float).contiguous().copy_data(&mut out, logits.numel());
        out
    }
}

/// The first of `len` tokens that a model with `places` positions sees. A full window moves by half its size.
fn first_seen(len: usize, places: usize) -> usize {
    let half = (places / 2).max(1);
    len.saturating_sub(places).div_ceil(half) * half
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::gpt::GptOptions;
    use drumline_text::SamplingOptions;
    use tch::Device;
    use tch::nn::VarStore;

    #[test]
    fn a_full_window_moves_by_half() {
        let seen: Vec<_> = (1..=14).map(|len| first_seen(len, 8)).collect();
        assert_eq!(seen, [0, 0, 0, 0, 0, 0, 0, 0, 4, 4, 4, 4, 8, 8]);
        for places in [1, 2, 3, 7] {
            for len in 1..30 {
                let seen = len - first_seen(len, places);
                assert!((1..=places).contains(&seen), "{len} of {places}");
            }
        }
    }

    fn model() -> (VarStore, Gpt) {
        let store = VarStore::new(Device::Cpu);
        let options = GptOptions {
            n_layer: 2,
            n_head: 2,
            n_embd: 16,
            n_positions: 8,
            vocab_size: 29,
            vocab_multiple: 16,
            ..Default::default()
        };
        let model = Gpt::new(&store.root(), &options).unwrap();
        // The weights come from a formula, because other tests draw random numbers at the same time. They are far
        // apart, so that another rounding does not change the samples.
        for (place, named) in drumline_torch::parameters(&store).into_iter().enumerate() {
            let (mut tensor, size) = (named.tensor.shallow_clone(), named.tensor.numel() as i64);
            let numbers = Tensor::arange(size, (Kind::Double, Device::Cpu)) * 0.7 + place as f64;
            no_grad(|| tensor.copy_(&(&numbers + &numbers * &numbers * 1e-3).sin().view_as(&named.tensor)));
        }
        (store, model)
    }

    fn generated(model: &Gpt, caching: Caching, sampling: SamplingOptions) -> Vec<u32> {
        let generator = Generator { model, end_of_text: 28, max_tokens: 30, caching };
        let (mut sampler, mut tokens) = (TokenSampler::new(sampling).unwrap(), Vec::new());
        let each = |token| {
            tokens.push(token);
            ControlFlow::Continue(())
        };
        generator.generate(&[1, 2, 3], &mut sampler, each).unwrap();
        tokens
    }

    #[test]
    fn the_cache_does_not_change_the_text_even_beyond_the_window() {
        let (_store, model) = model();
        let plain = SamplingOptions { temperature: 0.8, seed: 11, ..Default::default() };
        for sampling in [
            SamplingOptions { temperature: 0.0, ..plain },
            plain,
            SamplingOptions { top_k: Some(5), ..plain },
        ] {
            let [cached, recomputed] =
                [Caching::On, Caching::Off].map(|caching| generated(&model, caching, sampling));
            assert_eq!(cached, recomputed, "{sampling:?}");
            assert!(cached.len() > 10 && cached.iter().all(|token| *token < 28), "{cached:?}");
        }
        let other = generated(&model, Caching::On, SamplingOptions { seed: 12, ..plain });
        assert_ne!(generated(&model, Caching::On, plain), other, "control: the seed decides");
    }

    #[test]
    fn generation_stops_on_request_and_refuses_unknown_tokens() {
        let (_store, model) = model();
        let generator = Generator { model: &model, end_of_text: 28, max_tokens: 30, caching: Caching::On };
        let mut sampler =
            TokenSampler::new(SamplingOptions { temperature: 0.0, ..Default::default() }).unwrap();
        let mut count = 0;
        let stop = |_| {
            count += 1;
            if count == 4 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        generator.generate(&[], &mut sampler, stop).unwrap();
        assert_eq!(count, 4);
        let said =
            generator.generate(&[29], &mut sampler, |_| ControlFlow::Continue(())).unwrap_err().to_string();
        assert!(said.contains("token 29, but the model has 29 tokens; try the tokenizer"), "{said}");
    }

    #[test]
    fn an_unknown_end_of_text_token_is_refused() {
        let (_store, model) = model();
        let generator = Generator { model: &model, end_of_text: 29, max_tokens: 3, caching: Caching::On };
        let mut sampler = TokenSampler::new(SamplingOptions::default()).unwrap();
        for prompt in [&[][..], &[1, 2]] {
            let said = generator.generate(prompt, &mut sampler, |_| ControlFlow::Continue(()));
            let said = said.unwrap_err().to_string();
            assert!(said.contains("the end-of-text token is 29, but the model has 29 tokens; try"), "{said}");
        }
    }
}
