//! A bidirectional LSTM with the tensor names of PyTorch's `nn.LSTM`.
//!
//! Sentences are packed, longest first, so that neither direction sees padding.

use std::borrow::Borrow;

use drumline_torch::no_autocast;
use tch::nn::{Init, Path};
use tch::{Device, Kind, Tensor};

use crate::models::draw::drawn;

#[derive(Debug)]
pub(super) struct BiLstm {
    /// For each layer and direction: the input and hidden weights, and their biases.
    params: Vec<Tensor>,
    n_layers: i64,
    d_hidden: i64,
}

/// The outputs. The states of both directions are concatenated.
pub(super) struct States {
    /// The states of all words `[sentences, places, size]`; zero at padding.
    pub(super) words: Tensor,
    /// The last states of the last layer in each direction `[sentences, size]`.
    pub(super) last: Tensor,
}

impl BiLstm {
    pub(super) fn new<'a>(path: impl Borrow<Path<'a>>, inputs: i64, d_hidden: i64, n_layers: i64) -> Self {
        let path = path.borrow();
        let bound = (d_hidden as f64).powf(-0.5);
        let init = Init::Uniform { lo: -bound, up: bound };
        let mut params = Vec::new();
        for (layer, direction) in (0..n_layers).flat_map(|layer| [(layer, ""), (layer, "_reverse")]) {
            let inputs = if layer == 0 { inputs } else { 2 * d_hidden };
            let var =
                |name: &str, size: &[i64]| drawn(path, &format!("{name}_l{layer}{direction}"), size, init);
            params.push(var("weight_ih", &[4 * d_hidden, inputs]));
            params.push(var("weight_hh", &[4 * d_hidden, d_hidden]));
            params.push(var("bias_ih", &[4 * d_hidden]));
            params.push(var("bias_hh", &[4 * d_hidden]));
        }
        Self { params, n_layers, d_hidden }
    }

    /// `xs` is `[sentences, places, size]`; `p` is the dropout between layers.
    pub(super) fn forward(&self, xs: &Tensor, lengths: &Tensor, p: f64) -> States {
        let kind = self.params[0].kind();
        if kind != Kind::BFloat16 || !xs.device().is_cuda() {
            return self.states(&self.params, xs, lengths, p);
        }
        // On a GPU autocast has LSTMs compute in f16, and refuses weights in bf16 beside biases in f32.
        let states = no_autocast(xs.device(), || {
            let params: Vec<Tensor> = self.params.iter().map(|param| param.to_kind(kind)).collect();
            self.states(&params, &xs.to_kind(kind), lengths, p)
        });
        states.expect("autocast can be left on a device that exists")
    }

    fn states(&self, params: &[Tensor], xs: &Tensor, lengths: &Tensor, p: f64) -> States {
        let (sorted, order) = lengths.sort(0, true);
        let back = order.argsort(0, false);
        let (data, sizes) =
            xs.index_select(0, &order).internal_pack_padded_sequence(&sorted.to_device(Device::Cpu), true);
        let zeros = Tensor::zeros([2 * self.n_layers, xs.size()[0], self.d_hidden], (xs.kind(), xs.device()));
        let start = [&zeros, &zeros];
        let params: Vec<_> = params.iter().collect();
        let (out, hidden, _) =
            Tensor::lstm_data(&data, &sizes, &start, &params, true, self.n_layers, p, p > 0.0, true);
        let (words, _) = Tensor::internal_pad_packed_sequence(&out, &sizes, true, 0.0, xs.size()[1]);
        let last = hidden.narrow(0, 2 * self.n_layers - 2, 2).transpose(0, 1).flatten(1, 2);
        States { words: words.index_select(0, &back), last: last.index_select(0, &back) }
    }
}
