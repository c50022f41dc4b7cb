//! Local SGD: replicas train independently, and are averaged every few steps.
//!
//! With plain averages this is local SGD (Stich, "Local SGD converges fast and communicates
//! little", 2019); with a single average at the end, one-shot averaging (Zinkevich et al.,
//! "Parallelized stochastic gradient descent", 2010). An outer optimizer makes it `DiLoCo`
//! (Douillard et al., 2023). The optimizer state is averaged too (Cheng and Glasgow, "Convergence
//! of distributed adaptive optimization with local updates", 2024). After an average all replicas
//! are equal, so a checkpoint saved then can be loaded in any layout.
//!
//! A rank may train several replicas in turn, with the same bits as ranks that train one each:
//! means are added in one tree, whose lower levels run inside a rank.

use super::control_flags::ControlFlags;
use hpctrain_base::error::{Error, Result};
use hpctrain_base::tree_sum::tree_sum;

/// The settings of local SGD.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LocalSgd {
    /// The number of steps between two averages.
    pub every: u64,
    /// The number of replicas over all ranks.
    pub replicas: usize,
    /// The outer optimizer; none for plain averages.
    pub outer: Option<OuterOptimizer>,
}

/// The outer optimizer: SGD with Nesterov momentum, whose gradient is the negated change of the
/// averaged parameters since the last average.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OuterOptimizer {
    /// The learning rate.
    pub lr: f32,
    /// The momentum; 0 disables it.
    pub momentum: f32,
}

/// A step of one replica.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ReplicaStep {
    /// The mean loss of its samples.
    pub loss: f64,
    /// The norm of its gradient before clipping.
    pub norm: f64,
    /// Whether its update was skipped.
    pub skipped: bool,
}

/// A rank's message at an average about the steps since the last one; encoded as little-endian f64.
#[derive(Debug, Clone, PartialEq)]
pub struct RoundSummary {
    /// The control flags of the rank.
    pub flags: ControlFlags,
    /// The compute time of the rank in each step, in seconds.
    pub compute: Vec<f64>,
    /// The first replica that it trains.
    pub first_replica: usize,
    /// The steps of each replica that it trains; the same on all ranks that train a replica
    /// together.
    pub replicas: Vec<Vec<ReplicaStep>>,
}

impl RoundSummary {
    pub(super) fn encode(&self) -> Vec<u8> {
        let Self { flags, compute, first_replica, replicas } = self;
        let head = [f64::from(flags.bits()), *first_replica as f64, compute.len() as f64];
        let steps = replicas.iter().flatten();
        let steps =
            steps.flat_map(|step| [step.loss, step.norm, f64::from(u8::from(step.skipped))]);
        let all = head.into_iter().chain(compute.iter().copied()).chain(steps);
        all.flat_map(f64::to_le_bytes).collect()
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Self> {
        let numbers: Vec<f64> =
            bytes.as_chunks().0.iter().map(|chunk| f64::from_le_bytes(*chunk)).collect();
        let malformed = || Error::comm("another rank sent a malformed summary of its steps");
        let [flags, first_replica, steps, rest @ ..] = numbers.as_slice() else {
            return Err(malformed());
        };
        let steps = *steps as usize;
        let (compute, results) = rest.split_at_checked(steps).ok_or_else(malformed)?;
        if steps == 0 || results.is_empty() || !results.len().is_multiple_of(3 * steps) {
            return Err(malformed());
        }
        let step =
            |&[loss, norm, skipped]: &[f64; 3]| ReplicaStep { loss, norm, skipped: skipped != 0.0 };
        let replicas =
            results.as_chunks().0.chunks(steps).map(|steps| steps.iter().map(step).collect());
        Ok(Self {
            flags: ControlFlags::from_bits_retain(*flags as u32),
            compute: compute.to_vec(),
            first_replica: *first_replica as usize,
            replicas: replicas.collect(),
        })
    }
}

/// Returns the steps of every replica, in order, from the messages of all ranks.
///
/// # Errors
/// Returns an error if no message has the steps of some replica, or one has another number of
/// steps.
pub fn steps_of_replicas(
    summaries: &[RoundSummary],
    replicas: usize,
    steps: usize,
) -> Result<Vec<Vec<ReplicaStep>>> {
    let mut all = vec![None; replicas];
    for summary in summaries {
        for (replica, taken) in (summary.first_replica..).zip(&summary.replicas) {
            let to = all.get_mut(replica).filter(|_| taken.len() == steps);
            *to.ok_or_else(|| Error::comm("another rank has other steps or replicas"))? =
                Some(taken.clone());
        }
    }
    all.into_iter()
        .collect::<Option<_>>()
        .ok_or_else(|| Error::comm("the steps of a replica are missing"))
}

/// Returns the mean over replicas, added in the same tree as parameters.
pub fn mean(of_replicas: impl Iterator<Item = f64>) -> f64 {
    let all: Vec<f64> = of_replicas.collect();
    tree_sum(&all) / all.len() as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn summary(first_replica: usize, losses: &[[f64; 2]]) -> RoundSummary {
        let step = |&loss: &f64| ReplicaStep { loss, norm: 2.0 * loss, skipped: loss.is_nan() };
        RoundSummary {
            flags: ControlFlags::from_bits_retain(5),
            compute: vec![0.25, 0.5],
            first_replica,
            replicas: losses.iter().map(|steps| steps.iter().map(step).collect()).collect(),
        }
    }

    #[test]
    fn summaries_are_decoded_as_encoded() {
        let sent = summary(2, &[[1.5, f64::INFINITY], [0.5, 3.0]]);
        assert_eq!(RoundSummary::decode(&sent.encode()).unwrap(), sent);
        for cut in [0, 16, 40, 48, 72] {
            assert!(RoundSummary::decode(&sent.encode()[..cut]).is_err(), "{cut}");
        }
    }

    #[test]
    fn steps_of_replicas_do_not_depend_on_the_ranks() {
        let losses = |summaries: &[RoundSummary]| {
            let all = steps_of_replicas(summaries, 4, 2)?;
            Ok::<_, Error>(all.iter().map(|steps| steps[1].loss).collect::<Vec<f64>>())
        };
        let two = [summary(0, &[[0.0, 1.0], [0.0, 2.0]]), summary(2, &[[0.0, 3.0], [0.0, 4.0]])];
        assert_eq!(losses(&two).unwrap(), [1.0, 2.0, 3.0, 4.0]);
        // Ranks that train a replica together send the same steps.
        assert_eq!(losses(&[&two[..], &two[..]].concat()), losses(&two));
        assert!(losses(&two[..1]).is_err() && losses(&[summary(3, &[[0.0; 2]; 2])]).is_err());
        assert!(steps_of_replicas(&two, 4, 3).is_err());
        assert_eq!(mean([1.0, 2.0, 6.0].into_iter()), 3.0);
    }
}
