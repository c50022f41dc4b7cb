//! `parallel.work_shares`: unequal work for ranks of unequal speed.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::{Config, Interval, LayerList};
use hpctrain_base::error::{Error, Result};
use hpctrain_base::mesh::Mesh;
use hpctrain_nn::layers::Layer;
use hpctrain_parallel::{ReduceAfter, Storage, VirtualRanks};

/// The shares of the virtual ranks that data-parallel ranks compute.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Written", into = "Written")]
pub enum WorkShares {
    /// All ranks have the same, or one virtual rank more than others.
    Equal,
    /// Each rank has a share in proportion to its measured speed.
    Auto,
    /// A number for each data-parallel rank, positive but for owners of central storage that compute
    /// nothing.
    Given(Vec<f64>),
}

/// The forms of the value in a file.
#[derive(Serialize, Deserialize)]
#[serde(untagged, expecting = "\"equal\", \"auto\", or a list of numbers")]
enum Written {
    Text(String),
    Shares(Vec<f64>),
}

impl TryFrom<Written> for WorkShares {
    type Error = String;

    fn try_from(written: Written) -> Result<Self, String> {
        match written {
            Written::Text(text) if text == "equal" => Ok(Self::Equal),
            Written::Text(text) if text == "auto" => Ok(Self::Auto),
            Written::Text(text) => {
                Err(format!("{text:?} is neither \"equal\", \"auto\", nor a list of numbers"))
            }
            Written::Shares(shares) => Ok(Self::Given(shares)),
        }
    }
}

impl From<WorkShares> for Written {
    fn from(shares: WorkShares) -> Self {
        match shares {
            WorkShares::Equal => Self::Text("equal".into()),
            WorkShares::Auto => Self::Text("auto".into()),
            WorkShares::Given(shares) => Self::Shares(shares),
        }
    }
}

/// Checks that ranks without virtual ranks miss no message of the forwards of others: those of a loss
/// over the whole batch, and of statistics that ranks share.
///
/// # Errors
/// Returns an error if a rank has none and a forward has such messages.
pub fn check_idle(counts: Option<&[usize]>, over_batch: bool, layers: &LayerList) -> Result<()> {
    if counts.is_none_or(|counts| !counts.contains(&0)) {
        return Ok(());
    }
    let shared = match layers {
        LayerList::List(layers) => Layer::synchronised(layers, "model.layers"),
        LayerList::Count(_) => None,
    };
    let what = match shared {
        Some(place) => format!("{place} (batch_norm), which shares statistics among ranks"),
        None if over_batch => "a loss over the whole batch".into(),
        None => return Ok(()),
    };
    Err(Error::input(format!("a share of 0 in parallel.work_shares is not supported with {what}"))
        .hint("give every rank a positive share"))
}

/// Returns the number of virtual ranks of each data-parallel rank, if shares are given.
///
/// # Errors
/// Returns an error if the shares do not fit the ranks, or other keys require equal numbers.
pub fn counts(
    config: &Config,
    virtual_ranks: usize,
    reduce_after: ReduceAfter,
    mesh: &Mesh,
) -> Result<Option<Arc<[usize]>>> {
    let shares = &config.parallel.work_shares;
    if *shares == WorkShares::Equal {
        return Ok(None);
    }
    let refused = |why: &str| Error::input(format!("parallel.work_shares {why}"));
    let ranks = mesh.data();
    if ranks == 1 {
        // There is nothing to divide.
        return Ok(None);
    }
    if config.parallel.virtual_ranks.is_none() {
        return Err(refused("divides virtual ranks, but parallel.virtual_ranks is not set")
            .hint(format!("set parallel.virtual_ranks={} or more", 8 * ranks)));
    }
    if config.local_sgd.sync_every != Interval::Steps(0) {
        return Err(refused("is not supported with local_sgd.sync_every").hint("omit one of them"));
    }
    if reduce_after != ReduceAfter::StepInBlocks {
        return Err(
            refused("is not supported with parallel.reduce = micro").hint("omit parallel.reduce")
        );
    }
    match shares {
        WorkShares::Equal | WorkShares::Auto => Ok(None),
        WorkShares::Given(shares) if shares.len() != ranks => Err(refused(&format!(
            "has {} shares, but there are {ranks} data-parallel ranks",
            shares.len()
        ))
        .hint("give one for each, or set it to auto")),
        WorkShares::Given(shares) => {
            let owners = match config.parallel.storage {
                Storage::Central => mesh.shard,
                Storage::Ranks => 0,
            };
            let is_valid = |(rank, share): (usize, &f64)| {
                *share > 0.0 && share.is_finite() || *share == 0.0 && rank < owners
            };
            if let Some(share) = shares.iter().enumerate().find(|one| !is_valid(*one)) {
                return Err(refused(&format!("has the share {} of rank {}", share.1, share.0)).hint(
                    "give positive numbers, such as [2, 1]; only owners of parallel.storage = central \
                     may have 0",
                ));
            }
            if shares.iter().all(|share| *share == 0.0) {
                return Err(refused("gives all ranks the share 0")
                    .hint("give the ranks that compute positive numbers, such as [0, 1]"));
            }
            Ok(Some(VirtualRanks::deal(virtual_ranks, shares).into()))
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::{Environment, Sources, load, resolve};

    fn counts(settings: &[&str], ranks: usize) -> Result<Option<Vec<usize>>, String> {
        let overrides: Vec<String> = settings.iter().map(ToString::to_string).collect();
        let (config, _) = load(&Sources { overrides: &overrides, ..Sources::default() })
            .map_err(|e| e.to_string())?;
        let facts = Environment { ranks, threads: 1, vocabulary: Some(65), on_gpu: false };
        let plan = resolve(config, &facts).map_err(|e| e.to_string())?;
        // Resolved again it is the same.
        assert_eq!(resolve(plan.config.clone(), &facts).unwrap(), plan);
        Ok(plan.virtual_rank_counts.map(|counts| counts.to_vec()))
    }

    #[test]
    fn shares_become_numbers_of_virtual_ranks() {
        let ranks = "parallel.virtual_ranks=16";
        assert_eq!(counts(&[ranks, "parallel.work_shares=[3, 1]"], 2), Ok(Some(vec![12, 4])));
        assert_eq!(counts(&[ranks, "parallel.work_shares=auto"], 2), Ok(None));
        assert_eq!(counts(&[ranks], 2), Ok(None));
        assert_eq!(counts(&[ranks, "parallel.work_shares=[3, 1]"], 1), Ok(None));
        assert_eq!(counts(&[ranks, "parallel.work_shares=auto", "parallel.zero=3"], 4), Ok(None));
        let zero = "parallel.zero=3";
        let central = "parallel.storage=central";
        let auto = "parallel.work_shares=auto";
        assert_eq!(counts(&[ranks, auto, central], 2), Ok(None));
        assert_eq!(
            counts(&[ranks, "parallel.work_shares=[0, 1, 3]", central], 3),
            Ok(Some(vec![0, 4, 12]))
        );
        assert_eq!(counts(&[ranks, zero, "parallel.work_shares=[1, 2]"], 2), Ok(Some(vec![5, 11])));
        for (settings, words) in [
            (&["parallel.work_shares=auto"][..], "parallel.virtual_ranks is not set"),
            (&[ranks, "parallel.work_shares=[1]"], "has 1 shares, but there are 2"),
            (&[ranks, "parallel.work_shares=[1, 0]"], "has the share 0 of rank 1"),
            (&[ranks, "parallel.work_shares=[1, 0]", central], "has the share 0 of rank 1"),
            (&[ranks, "parallel.work_shares=[0, 0]", central, "parallel.owners=2"], "gives all"),
            (&[ranks, "parallel.work_shares=some"], "is neither"),
            (
                &[
                    ranks,
                    "parallel.work_shares=[0, 1]",
                    central,
                    "model.kind=layers",
                    "model.input=[8]",
                    "model.layers=[{kind='dense',units=8}]",
                    "loss.kind=contrastive",
                ],
                "a share of 0 in parallel.work_shares is not supported with a loss over the whole",
            ),
            (
                &[ranks, "parallel.work_shares=[1, 2]", "comm.algorithm=ring"],
                "comm.algorithm = ring requires as many virtual ranks on every rank",
            ),
            (
                &[ranks, "parallel.work_shares=[1, 2]", "parallel.reduce=micro", zero],
                "is not supported with parallel.reduce = micro",
            ),
        ] {
            let refused = counts(settings, 2).unwrap_err();
            assert!(refused.contains(words) && refused.contains("hint:"), "{refused}");
        }
    }
}
