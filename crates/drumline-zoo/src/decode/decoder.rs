//! Incremental decoding: computes one token at a time, with cached keys and values.
//!
//! ```text
//!   source: keys, values      sentences × heads × places × size   computed once, shared by the rows of a sentence
//!   past:   keys, values      rows × heads × room × size          one more place at each step, reordered with the rows
//! ```

use tch::Tensor;

use crate::models::transformer::{KeysValues, Sources, Transformer};

/// The rows and sentences that continue after a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kept {
    /// The old row that each new row continues, sentence by sentence.
    pub rows: Vec<i64>,
    /// The sentences that continue.
    pub sentences: Vec<i64>,
}

/// The state of a batch of sentences with the same number of rows each.
///
/// ```
/// use drumline_zoo::decode::{Decoder, Kept};
/// use drumline_zoo::models::transformer::{Transformer, TransformerOptions, padded};
/// use tch::{Device, Tensor, nn::VarStore, no_grad};
///
/// let store = VarStore::new(Device::Cpu);
/// let (d_word_vec, d_model, src_vocab, tgt_vocab) = (16, 16, 11, 13);
/// let small = TransformerOptions {
///     n_layers: 2, n_head: 4, d_word_vec, d_model, d_inner_hid: 32, src_vocab, tgt_vocab, ..Default::default()
/// };
/// let model = Transformer::new(&store.root(), &small)?;
/// no_grad(|| {
///     // Two sentences, three translations of each; all begin with 3.
///     let mut decoder = Decoder::new(&model, &padded(&[vec![4, 5, 6], vec![7, 8]], 0), 3);
///     assert_eq!(decoder.next(&Tensor::from_slice(&[3i64; 6])).size(), [6, 13]);
///     // Only the second sentence continues, with its first translation twice.
///     decoder.keep(&Kept { rows: vec![3, 3, 4], sentences: vec![1] });
///     assert_eq!(decoder.next(&Tensor::from_slice(&[9i64, 10, 9])).size(), [3, 13]);
/// });
/// # Ok::<(), drumline_zoo::ZooError>(())
/// ```
#[derive(Debug)]
pub struct Decoder<'a> {
    model: &'a Transformer,
    source: Vec<KeysValues>,
    mask: Tensor,
    past: Past,
}

impl<'a> Decoder<'a> {
    /// Encodes `source` `[sentences, places]`, for `rows` translations of each sentence.
    pub fn new(model: &'a Transformer, source: &Tensor, rows: usize) -> Self {
        let memory = model.encode(source);
        let kept = model.keys_values(&memory);
        let past = Past::new(&kept[0].keys, kept.len() as i64, rows as i64);
        Self { model, source: kept, mask: memory.mask, past }
    }

    /// The logits of each row's next token `[rows, vocabulary]`, given its last one.
    pub fn next(&mut self, words: &Tensor) -> Tensor {
        let Self { model, source, mask, past } = self;
        past.make_room();
        let place = past.places;
        let logits = model
            .next(words, place, Sources { kept: source, mask }, |layer, new| past.with(layer as i64, &new));
        past.places += 1;
        logits
    }

    /// Reorders the rows and drops those of finished sentences.
    pub fn keep(&mut self, kept: &Kept) {
        let device = self.mask.device();
        if !kept.rows.iter().copied().eq(0..self.past.rows()) {
            self.past.keep(&Tensor::from_slice(&kept.rows).to_device(device));
        }
        if kept.sentences.len() as i64 == self.mask.size()[0] {
            return;
        }
        let sentences = Tensor::from_slice(&kept.sentences).to_device(device);
        self.mask = self.mask.index_select(0, &sentences);
        for KeysValues { keys, values } in &mut self.source {
            *keys = keys.index_select(0, &sentences);
            *values = values.index_select(0, &sentences);
        }
    }
}

/// Keys and values of all places so far, for all layers, in one tensor `[2 · layers, rows, heads, capacity, size]`.
#[derive(Debug)]
struct Past {
    kept: Tensor,
    places: i64,
}

/// The number of places by which the capacity grows.
const ROOM: i64 = 16;

impl Past {
    fn new(like: &Tensor, layers: i64, rows: i64) -> Self {
        let size = like.size();
        let size = [2 * layers, size[0] * rows, size[1], 0, size[3]];
        Self { kept: Tensor::empty(size, (like.kind(), like.device())), places: 0 }
    }

    fn rows(&self) -> i64 {
        self.kept.size()[1]
    }

    fn make_room(&mut self) {
        let mut size = self.kept.size();
        if self.places == size[3] {
            size[3] = ROOM;
            let room = Tensor::empty(size, (self.kept.kind(), self.kept.device()));
            self.kept = Tensor::cat(&[&self.kept, &room], 3);
        }
    }

    /// Appends a place to a layer and returns all places of the layer.
    fn with(&mut self, layer: i64, new: &KeysValues) -> KeysValues {
        let add = |part: i64, new: &Tensor| {
            let all = self.kept.get(part);
            all.narrow(2, self.places, 1).copy_(new);
            all.narrow(2, 0, self.places + 1)
        };
        KeysValues { keys: add(2 * layer, &new.keys), values: add(2 * layer + 1, &new.values) }
    }

    fn keep(&mut self, rows: &Tensor) {
        self.kept = self.kept.index_select(1, rows);
    }
}
