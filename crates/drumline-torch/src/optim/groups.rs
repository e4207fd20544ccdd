//! Parameter groups with their own learning rate and weight decay.

use crate::named::Named;

/// Parameters that share a factor of the learning rate and a weight decay.
#[derive(Debug, Clone)]
pub struct ParameterGroup {
    /// The parameters.
    pub parameters: Vec<Named>,
    /// The learning rate is multiplied by this.
    pub lr_factor: f64,
    /// Their weight decay; `None` means the optimizer's.
    pub weight_decay: Option<f64>,
}

impl From<Vec<Named>> for ParameterGroup {
    fn from(parameters: Vec<Named>) -> Self {
        Self { parameters, lr_factor: 1.0, weight_decay: None }
    }
}

/// All groups of an optimizer. A list of parameters makes one group.
#[derive(Debug, Clone)]
pub struct ParameterGroups(pub Vec<ParameterGroup>);

impl ParameterGroups {
    /// The parameters of all groups.
    pub fn into_parameters(self) -> Vec<Named> {
        self.0.into_iter().flat_map(|group| group.parameters).collect()
    }
}

impl From<Vec<Named>> for ParameterGroups {
    fn from(parameters: Vec<Named>) -> Self {
        Self(vec![parameters.into()])
    }
}

impl From<Vec<ParameterGroup>> for ParameterGroups {
    fn from(groups: Vec<ParameterGroup>) -> Self {
        Self(groups)
    }
}

/// Two groups: parameters with weight decay; and biases and norms, without it.
///
/// A parameter with fewer than two dimensions, or one named `bias`, has no weight decay.
///
/// ```
/// use drumline_torch::{no_decay_on_norms, parameters};
/// use tch::{nn, Device};
///
/// let vs = nn::VarStore::new(Device::Cpu);
/// let _conv = nn::conv2d(vs.root() / "conv", 3, 8, 3, Default::default());
/// let _norm = nn::batch_norm2d(vs.root() / "bn", 8, Default::default());
/// let [decaying, kept] = no_decay_on_norms(parameters(&vs));
/// assert_eq!(decaying.parameters.iter().map(|p| p.name.as_str()).collect::<Vec<_>>(), ["conv.weight"]);
/// assert_eq!(kept.parameters.len(), 3);
/// assert_eq!(kept.weight_decay, Some(0.0));
/// ```
pub fn no_decay_on_norms(parameters: Vec<Named>) -> [ParameterGroup; 2] {
    let (decaying, kept): (Vec<_>, Vec<_>) = parameters.into_iter().partition(decays);
    [decaying.into(), ParameterGroup { weight_decay: Some(0.0), ..kept.into() }]
}

impl<const N: usize> From<[ParameterGroup; N]> for ParameterGroups {
    fn from(groups: [ParameterGroup; N]) -> Self {
        Self(groups.into())
    }
}

fn decays(parameter: &Named) -> bool {
    let is_bias = parameter.name.rsplit('.').next() == Some("bias");
    parameter.tensor.dim() >= 2 && !is_bias
}
