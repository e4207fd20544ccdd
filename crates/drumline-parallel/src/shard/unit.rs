//! Which parameters make a unit: they are reduced, gathered and freed together.
//!
//! Parameters of a numbered block, such as `h.3.attn.weight` and `h.3.mlp.weight`, are the unit `h.3`. Of the others
//! each large one is a unit of its own, so that no unit is much larger than a block, and all small ones are one unit.

use drumline_plan::{Parameter, UnitLayout};
use drumline_torch::Named;
use tch::Kind;

/// A parameter outside of numbered blocks is a unit of its own from this many elements on.
pub(super) const LARGE: usize = 1 << 20;

/// Parameters of one kind of element that lie together in flat memory.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct UnitPlan {
    /// For messages: `h.3`, `wte.weight`, or empty for the rest.
    pub(super) name: String,
    pub(super) kind: Kind,
    /// Indices of its parameters in the list that was planned.
    pub(super) members: Vec<usize>,
    /// Where they lie, and which rank owns what.
    pub(super) layout: UnitLayout,
}

impl UnitPlan {
    /// Where an element of a rank's rows lies in a memory that has only these.
    pub(super) fn own_place(&self, rank: usize, element: usize) -> usize {
        let mut before = 0;
        for shard in self.layout.shards(rank) {
            if shard.contains(&element) {
                return before + element - shard.start;
            }
            before += shard.len();
        }
        before
    }
}

/// Plans the units of these parameters for a number of ranks. Every parameter is in one unit. With `keep`, parameters of at
/// most that many elements are in units without a name, and no other is.
pub(super) fn plan_units(params: &[Named], num_ranks: usize, keep: Option<usize>) -> Vec<UnitPlan> {
    let mut groups: Vec<(&str, Kind, Vec<usize>)> = Vec::new();
    for (index, Named { name, tensor }) in params.iter().enumerate() {
        let unit = match (keep, unit_of(name, tensor.numel())) {
            (Some(most), _) if tensor.numel() <= most => "",
            (Some(most), unit) if unit.is_empty() || unit == name => module_of(index, params, most),
            (_, unit) => unit,
        };
        let kind = tensor.kind();
        match groups.iter_mut().find(|(name, of, _)| *name == unit && *of == kind) {
            Some((_, _, members)) => members.push(index),
            None => groups.push((unit, kind, vec![index])),
        }
    }
    let plan = |(name, kind, members): (&str, Kind, Vec<usize>)| {
        let parameters = members.iter().map(|index| parameter(&params[*index])).collect();
        UnitPlan { name: name.to_owned(), kind, members, layout: UnitLayout::new(parameters, num_ranks) }
    };
    groups.into_iter().map(plan).collect()
}

/// The unit of a large parameter outside of numbered blocks: itself, or its module if an operation uses several large
/// parameters of that together, as an LSTM's does.
fn module_of(index: usize, params: &[Named], most: usize) -> &str {
    let name = params[index].name.as_str();
    let Some((module, _)) = name.rsplit_once('.') else { return name };
    let is_of_it = |other: &Named| other.name.rsplit_once('.').is_some_and(|(of, _)| of == module);
    let is_large = |other: &&Named| other.tensor.numel() > most && is_of_it(other);
    if params.iter().filter(is_large).count() > 1 { module } else { name }
}

/// The names of each unit's parameters, for one rank that has all of them.
pub(crate) fn names_of_units(params: &[Named]) -> Vec<Vec<String>> {
    let names = |plan: UnitPlan| plan.members.iter().map(|member| params[*member].name.clone()).collect();
    plan_units(params, 1, None).into_iter().map(names).collect()
}

fn parameter(Named { name, tensor }: &Named) -> Parameter {
    let shape: Vec<usize> = tensor.size().into_iter().map(|size| size as usize).collect();
    Parameter::new(name.clone(), &shape)
}

/// The unit of a parameter: its path up to the first number, its own name, or nothing.
fn unit_of(name: &str, num_elements: usize) -> &str {
    let mut end = 0;
    for part in name.split('.') {
        end += part.len();
        if !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit()) {
            return &name[..end];
        }
        end += 1;
    }
    if num_elements >= LARGE { name } else { "" }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::{Device, Tensor};

    #[test]
    fn blocks_and_large_tables_are_units() {
        assert_eq!(unit_of("h.11.attn.c_attn.weight", 9), "h.11");
        assert_eq!(unit_of("encoder.layer.0.output.dense.weight", 9), "encoder.layer.0");
        assert_eq!(unit_of("layer1.0.conv1.weight", 9), "layer1.0");
        assert_eq!(unit_of("wte.weight", LARGE), "wte.weight");
        assert_eq!(unit_of("ln_f.weight", 768), "");
        assert_eq!(unit_of("0", 9), "0");
    }

    #[test]
    fn kinds_do_not_share_a_unit() {
        let named = |name: &str, kind| Named {
            name: name.into(),
            tensor: Tensor::zeros([3, 2], (kind, Device::Cpu)),
        };
        let params = [
            named("h.0.a", Kind::Float),
            named("h.0.b", Kind::BFloat16),
            named("h.0.c", Kind::Float),
            named("x", Kind::Float),
        ];
        let units = plan_units(&params, 2, None);
        let members: Vec<_> = units.iter().map(|unit| (unit.name.as_str(), unit.members.clone())).collect();
        assert_eq!(members, [("h.0", vec![0, 2]), ("h.0", vec![1]), ("", vec![3])]);
        assert_eq!(units[0].layout.num_elements(), 12);
    }

    #[test]
    fn large_parameters_of_one_module_are_together_where_they_are_gathered() {
        let named = |name: &str, len: i64| Named {
            name: name.into(),
            tensor: Tensor::zeros([len], (Kind::Float, Device::Cpu)),
        };
        let params = [
            named("lstm.weight_ih_l0", 101),
            named("lstm.weight_hh_l0", 101),
            named("lstm.bias_ih_l0", 9),
            named("fc.weight", 101),
            named("table", 101),
            named("h.0.weight", 101),
        ];
        let units = plan_units(&params, 2, Some(100));
        let members: Vec<_> = units.iter().map(|unit| (unit.name.as_str(), unit.members.clone())).collect();
        let expected = [
            ("lstm", vec![0, 1]),
            ("", vec![2]),
            ("fc.weight", vec![3]),
            ("table", vec![4]),
            ("h.0", vec![5]),
        ];
        assert_eq!(members, expected);
    }

    #[test]
    fn small_parameters_are_together_where_they_stay_gathered() {
        let named = |name: &str, len: usize| Named {
            name: name.into(),
            tensor: Tensor::zeros([len as i64], (Kind::Float, Device::Cpu)),
        };
        let params = [
            named("h.0.w", 101),
            named("h.0.b", 3),
            named("ln.b", 3),
            named("head", 101),
            named("h.1.b", 100),
        ];
        let units = plan_units(&params, 2, Some(100));
        let members: Vec<_> = units.iter().map(|unit| (unit.name.as_str(), unit.members.clone())).collect();
        assert_eq!(members, [("h.0", vec![0]), ("", vec![1, 2, 4]), ("head", vec![3])]);
        for unit in &units {
            for rank in 0..2 {
                let starts = unit.layout.shards(rank).map(|shard| shard.start);
                let places: Vec<_> = starts.map(|start| unit.own_place(rank, start)).collect();
                assert_eq!(places[0], 0);
            }
        }
    }
}
