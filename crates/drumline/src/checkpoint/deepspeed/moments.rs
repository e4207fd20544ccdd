//! Adam's moments, which lie in flat tensors as the parameters do.

use drumline_pickle::TensorInfo;
use drumline_torch::OptimizerState;
use tch::Kind;

use super::super::safetensors::{elements, map_bytes};
use super::error::DeepSpeedError;
use super::fields::Field;
use super::partition::{Cut, Piece};
use super::states::{Flat, Opened, flat_tensor};
use super::stretches::Planned;

type Result<T = ()> = std::result::Result<T, DeepSpeedError>;

/// The optimizer's state, without the values of its tensors.
pub(super) struct Moments {
    /// Kind and settings.
    pub(super) state: OptimizerState,
    /// `NAME.step`, `NAME.exp_avg`, `NAME.exp_avg_sq` of each trained parameter.
    pub(super) tensors: Vec<Planned>,
}

const SLOTS: [&str; 2] = ["exp_avg", "exp_avg_sq"];

/// Reads the state of Adam or AdamW of all ranks.
pub(super) fn read_moments(opened: &Opened, stage: u64, flat: &Flat, cuts: &[Cut]) -> Result<Moments> {
    let base = |rank: usize| {
        let key = if stage == 3 { "optimizer_state_dict" } else { "base_optimizer_state" };
        opened.optimizer(rank).get(key)
    };
    let mut tensors = Vec::new();
    for slot in SLOTS {
        let moments = of_slot(flat, slot, &base)?;
        for Cut { param, pieces } in cuts {
            let is_there =
                |piece: &Piece| piece.first + piece.len <= moments.tensors[piece.rank][piece.group].numel();
            if !pieces.iter().all(is_there) {
                return Err(opened.layout_error(&format!("`{slot}` of `{}` is not complete", param.name)));
            }
            let stretches = opened.stretches(&moments, pieces)?;
            let name = format!("{}.{slot}", param.name);
            tensors.push(Planned::joined(name, param.shape.clone(), stretches));
        }
    }
    for Cut { param, pieces } in cuts {
        let group = pieces.first().map_or(0, |piece| piece.group);
        let steps = steps(opened, &base(0), group)?;
        tensors.push(Planned::number(format!("{}.step", param.name), steps));
    }
    Ok(Moments { state: settings(opened, &base(0))?, tensors })
}

/// The flat tensors of a slot. They may have padding where those of the parameters have none.
fn of_slot<'a>(flat: &Flat, slot: &str, base: &impl Fn(usize) -> Field<'a>) -> Result<Flat> {
    let of_group =
        |rank: usize, group: usize| flat_tensor(&base(rank).get("state").get_numbered(group).get(slot));
    let of_rank = |(rank, groups): (usize, &Vec<TensorInfo>)| {
        (0..groups.len()).map(|group| of_group(rank, group)).collect()
    };
    let tensors = flat.tensors.iter().enumerate().map(of_rank).collect::<Result<_>>()?;
    Ok(Flat { tensors })
}

/// Steps that were made: with each parameter, or with each group of parameters.
fn steps(opened: &Opened, base: &Field<'_>, group: usize) -> Result<f64> {
    let of_state = base.get("state").get_numbered(group).get("step");
    let of_group = base.get("param_groups").get_numbered(group).get("step");
    if let Some(steps) = of_state.number().or(of_group.number()) {
        return Ok(steps);
    }
    let tensor = of_state.tensor()?;
    if tensor.numel() != 1 || tensor.dtype != drumline_pickle::Dtype::Float32 {
        return Err(of_state.error("a number of steps"));
    }
    let file = &opened.files[opened.optimizer_file(0)];
    let bytes = file.bytes_of(tensor)?;
    let unreadable = |error: &dyn ToString| opened.layout_error(error);
    let mapped = map_bytes(file.path()).map_err(|error| unreadable(&error))?;
    let value = elements(&mapped, bytes, Kind::Float).map_err(|error| unreadable(&error))?;
    Ok(value.double_value(&[0]))
}

/// Kind and settings, from the first group of parameters.
fn settings(opened: &Opened, base: &Field<'_>) -> Result<OptimizerState> {
    let group = base.get("param_groups").get_numbered(0);
    let betas = group.get("betas").items()?;
    let beta = |place: usize| betas.get(place).and_then(Field::number);
    let named = [
        ("lr", group.get("lr").number()),
        ("eps", group.get("eps").number()),
        ("weight_decay", group.get("weight_decay").number()),
        ("beta1", beta(0)),
        ("beta2", beta(1)),
        ("amsgrad", Some(0.0)),
        ("maximize", Some(0.0)),
    ];
    let scalars = named.into_iter().map(|(name, value)| Some((name.to_owned(), value?)));
    let scalars = scalars.collect::<Option<_>>().ok_or_else(|| group.error("the settings of Adam"))?;
    let kind = if is_l2(opened, &group) { "adam" } else { "adamw" };
    Ok(OptimizerState { kind: kind.into(), scalars, tensors: Vec::new() })
}

/// Whether weight decay is added to gradients: an `Adam` with `"adam_w_mode": false`, or PyTorch's Adam.
fn is_l2(opened: &Opened, group: &Field<'_>) -> bool {
    let optimizer = opened.config().get("optimizer");
    match optimizer.get("type").text() {
        Ok(name) => {
            name.eq_ignore_ascii_case("adam") && optimizer.get("params").get("adam_w_mode").is_false()
        }
        Err(_) => group.get("decoupled_weight_decay").is_false(),
    }
}
