//! Parameter groups, with their own learning rate and weight decay.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use hpctrain_base::layout::{Tensor, UnitLayout};
use hpctrain_base::pattern::Pattern;

/// A parameter group: tensors selected by name, and their settings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Group {
    /// The pattern of tensor names; `*` matches any characters.
    pub names: Pattern,
    /// The factor on the learning rate; 0 freezes the parameters.
    #[serde(default = "Group::one")]
    pub lr_factor: f32,
    /// The weight decay. Default: `optimizer.weight_decay` for matrices and 0 for vectors.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight_decay: Option<f32>,
}

impl Group {
    fn one() -> f32 {
        1.0
    }

    /// Returns true if the tensor is in the group.
    pub fn holds(&self, tensor: &Tensor) -> bool {
        self.names.matches(&tensor.name)
    }
}

/// Consecutive elements that are updated with the same settings.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GroupRun {
    /// The number of elements.
    pub len: usize,
    /// The factor on the learning rate.
    pub lr_factor: f32,
    /// Their own weight decay, or `None` for that of the run if `decays`.
    pub weight_decay: Option<f32>,
    /// Whether the run's weight decay applies to them.
    pub decays: bool,
    /// The index of the tensor in the unit by whose norms their step is scaled (LAMB and LARS).
    pub scaled_by: Option<usize>,
    /// The rate of a running average, if they are one ([`Tensor::average`]).
    pub average: Option<f32>,
}

impl GroupRun {
    const PADDING: Self = Self {
        len: 0,
        lr_factor: 1.0,
        weight_decay: None,
        decays: false,
        scaled_by: None,
        average: None,
    };

    /// Creates the run of a whole tensor, without layer-wise scaling.
    pub fn from_tensor(tensor: &Tensor, groups: &[Group]) -> Self {
        let group = groups.iter().find(|group| group.holds(tensor));
        GroupRun {
            len: tensor.len(),
            lr_factor: group.map_or(1.0, |group| group.lr_factor),
            weight_decay: group.and_then(|group| group.weight_decay),
            decays: tensor.decays(),
            scaled_by: None,
            average: tensor.average,
        }
    }

    /// Returns the weight decay, where `default` is that of the run.
    pub fn decay(&self, default: f32) -> f32 {
        self.weight_decay.unwrap_or(if self.decays { default } else { 0.0 })
    }

    fn is_like(&self, other: &GroupRun) -> bool {
        Self { len: other.len, ..*self } == *other
    }
}

/// Returns the runs of a range of a unit, in order. Padding after tensors without weight decay
/// belongs to their run. If `layerwise`, each matrix is a separate run
/// ([`UpdateRule::is_layerwise`](super::UpdateRule::is_layerwise)).
pub fn group_runs(
    layout: &UnitLayout,
    range: Range<usize>,
    groups: &[Group],
    layerwise: bool,
) -> Vec<GroupRun> {
    let mut parts: Vec<GroupRun> = Vec::new();
    let mut add = |part: GroupRun| match parts.last_mut() {
        _ if part.len == 0 => {}
        Some(last) if last.is_like(&part) => last.len += part.len,
        _ => parts.push(part),
    };
    let mut end = 0;
    for piece in layout.stored(range.clone()) {
        add(GroupRun { len: piece.of_owned.start - end, ..GroupRun::PADDING });
        end = piece.of_owned.end;
        let part = GroupRun::from_tensor(piece.tensor, groups);
        let scaled_by = (layerwise && part.decays).then_some(piece.index);
        add(GroupRun { len: piece.of_owned.len(), scaled_by, ..part });
    }
    add(GroupRun { len: range.len() - end, ..GroupRun::PADDING });
    parts
}

#[cfg(test)]
mod tests {
    use super::*;
    use hpctrain_base::layout::Init;

    /// Returns a run that is neither scaled by a norm nor a running average.
    fn part(len: usize, lr_factor: f32, weight_decay: Option<f32>, decays: bool) -> GroupRun {
        GroupRun { len, lr_factor, weight_decay, decays, scaled_by: None, average: None }
    }

    #[test]
    fn neighbours_with_equal_settings_are_one_run() {
        let tensor = |name: &str, shape: &[usize]| Tensor::new(name, shape, Init::Zeros);
        let tensors = vec![
            tensor("a.weight", &[2, 3]),
            tensor("b.weight", &[2, 2]),
            tensor("a.bias", &[3]),
            tensor("b.bias", &[2]),
        ];
        let layout = UnitLayout::new("unit", tensors, 1);
        let plain = [part(10, 1.0, None, true), part(6, 1.0, None, false)];
        assert_eq!(group_runs(&layout, 0..16, &[], false), plain);
        let scaled =
            |len, tensor| GroupRun { scaled_by: Some(tensor), ..part(len, 1.0, None, true) };
        assert_eq!(group_runs(&layout, 2..16, &[], true), [scaled(4, 0), scaled(4, 1), plain[1]]);
        let group = |names: &str, lr_factor, weight_decay| Group {
            names: names.parse().unwrap(),
            lr_factor,
            weight_decay,
        };
        let groups =
            [group("a.*", 0.5, None), group("*.bias", 2.0, Some(0.1)), group("b.*", 9.0, None)];
        let expected = [
            part(6, 0.5, None, true),
            part(4, 9.0, None, true),
            part(3, 0.5, None, false),
            part(2, 2.0, Some(0.1), false),
            part(1, 1.0, None, false),
        ];
        assert_eq!(group_runs(&layout, 0..16, &groups, false), expected);
        assert_eq!(
            group_runs(&layout, 8..12, &groups, false),
            [part(2, 9.0, None, true), part(2, 0.5, None, false)]
        );
        assert_eq!(expected.map(|part| part.decay(0.3)), [0.3, 0.3, 0.0, 0.1, 0.0]);
    }
}
