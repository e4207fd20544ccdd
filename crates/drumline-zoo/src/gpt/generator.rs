//! Token after token, each drawn from what the model makes of those before.
//!
//! A model sees `n_positions` tokens. A text that gets longer goes on with the later half of them, so that a cache is made anew once in so many tokens.

use std::ops::ControlFlow;

use drumline_text::TokenSampler;
use tch::{Kind, Tensor, no_grad};

use crate::error::ZooError;
use crate::models::gpt::{Gpt, KvCache};

/// Whether the keys and values of tokens are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Caching {
    /// A new token costs one place.
    #[default]
    Kept,
    /// Everything is computed anew for each token: for comparison.
    Anew,
}

/// Continues texts.
#[derive(Debug)]
pub struct Generator<'a> {
    /// What says which token is how likely.
    pub model: &'a Gpt,
    /// The token at which a text ends.
    pub end_of_text: u32,
    /// The most tokens that are added.
    pub max_tokens: usize,
    /// For speed, or for comparison.
    pub caching: Caching,
}

impl Generator<'_> {
    /// Gives each token behind `prompt` to `each` as it comes, until the text ends, `each` breaks, or there are enough. An empty prompt is the beginning of
    /// a text.
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
                    "a text ends with token {}, but the model knows {words}, from 0 on",
                    self.end_of_text
                ),
                fix: "the tokenizer that it was trained with, or its eos_token_id in config.json".into(),
            });
        }
        match prompt.iter().find(|token| i64::from(**token) >= words) {
            Some(token) => Err(ZooError::Unsuitable {
                what: format!("the prompt has token {token}, but the model knows {words}"),
                fix: "the tokenizer that it was trained with".into(),
            }),
            None => Ok(()),
        }
    }
}

/// What is kept of a text.
struct State {
    cache: KvCache,
    /// The first token that the model sees.
    start: usize,
}

impl State {
    /// Logits of the token behind these, without those of added rows.
    fn next(&mut self, generator: &Generator<'_>, tokens: &[i64]) -> Vec<f32> {
        let Generator { model, caching, .. } = generator;
        let start = first_seen(tokens.len(), model.options().n_positions as usize);
        if start != self.start || *caching == Caching::Anew {
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

/// The first of `len` tokens that a model with so many places sees: the window moves by half its size when it is full.
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
        // By formula, as tests beside this one draw as well; far from even, so that another rounding does not change what is drawn.
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
    fn the_cache_changes_nothing_also_beyond_the_window() {
        let (_store, model) = model();
        let plain = SamplingOptions { temperature: 0.8, seed: 11, ..Default::default() };
        for sampling in [
            SamplingOptions { temperature: 0.0, ..plain },
            plain,
            SamplingOptions { top_k: Some(5), ..plain },
        ] {
            let [kept, anew] =
                [Caching::Kept, Caching::Anew].map(|caching| generated(&model, caching, sampling));
            assert_eq!(kept, anew, "{sampling:?}");
            assert!(kept.len() > 10 && kept.iter().all(|token| *token < 28), "{kept:?}");
        }
        let other = generated(&model, Caching::Kept, SamplingOptions { seed: 12, ..plain });
        assert_ne!(generated(&model, Caching::Kept, plain), other, "control: the seed decides");
    }

    #[test]
    fn it_ends_when_it_is_told_to_and_refuses_unknown_tokens() {
        let (_store, model) = model();
        let generator = Generator { model: &model, end_of_text: 28, max_tokens: 30, caching: Caching::Kept };
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
        assert!(said.contains("token 29, but the model knows 29; try the tokenizer"), "{said}");
    }

    #[test]
    fn an_end_of_text_that_the_model_does_not_know_is_refused() {
        let (_store, model) = model();
        let generator = Generator { model: &model, end_of_text: 29, max_tokens: 3, caching: Caching::Kept };
        let mut sampler = TokenSampler::new(SamplingOptions::default()).unwrap();
        for prompt in [&[][..], &[1, 2]] {
            let said = generator.generate(prompt, &mut sampler, |_| ControlFlow::Continue(()));
            let said = said.unwrap_err().to_string();
            assert!(said.contains("ends with token 29, but the model knows 29, from 0 on; try"), "{said}");
        }
    }
}
