//! Audits: memory that changes between updates, and replicas whose arithmetic differs.

use serde::{Deserialize, Serialize};

use super::Sharded;
use hpctrain_base::error::{Error, Result};
use hpctrain_device::Kernels;

/// A replica's digests, as others hear of them.
#[derive(Serialize, Deserialize)]
struct Told {
    /// Rank and host.
    place: String,
    /// Of each unit.
    digests: Vec<Option<u64>>,
}

impl<B: Kernels> Sharded<B> {
    /// Before the update of step `step`: looks whether the last update has found all as the one
    /// before had left it, and every so many steps whether replicas have the same values.
    /// Collective over replicas. Without audits nothing.
    ///
    /// # Errors
    /// Values have changed, or differ; or a message failed.
    pub fn audit(&mut self, step: u64) -> Result<()> {
        if let Some(tables) = &mut self.tables {
            tables.audit(step)?;
        }
        let Some(audits) = &mut self.audits else { return Ok(()) };
        let good = *audits.good.get_or_insert(step);
        let compares = step.is_multiple_of(audits.every);
        let place = self.groups.step.replica.place();
        let mut digests = Vec::with_capacity(self.units.len());
        for unit in &mut self.units {
            let digest = unit.owner.digest();
            digests.push(
                digest.map_err(|e| {
                    e.at(format_args!("step {step}: {} on {place}", unit.layout.name))
                })?,
            );
        }
        if !compares {
            return Ok(());
        }
        let mine = serde_json::to_vec(&Told { place, digests })
            .map_err(|e| Error::internal(e.to_string()))?;
        let told = self.groups.step.replica.gather_bytes(mine).wait()?;
        let malformed = |e| Error::comm(format!("another rank sent malformed digests: {e}"));
        let told: Vec<Told> = told
            .iter()
            .map(|one| serde_json::from_slice(one))
            .collect::<Result<_, _>>()
            .map_err(malformed)?;
        for (index, unit) in self.units.iter().enumerate() {
            let digest = |one: &Told| one.digests.get(index).copied().flatten();
            let of_unit: Vec<(&str, Option<u64>)> =
                told.iter().map(|one| (one.place.as_str(), digest(one))).collect();
            if let Some(who) = odd_ones(&of_unit) {
                audits.doubtful_since = Some(good);
                let told = format!(
                    "step {step}: parameters or optimizer state of {} {who}",
                    unit.layout.name
                );
                return Err(Error::corrupted(told).hint(format!(
                    "arithmetic or memory of a machine fails there: continue with --resume auto without it; checkpoints after \
                     step {good} count as damaged"
                )));
            }
        }
        audits.good = Some(step);
        Ok(())
    }

    /// Compares all that this rank owns with the values that the last update has left: before they
    /// are saved. Without audits nothing.
    ///
    /// # Errors
    /// Values have changed.
    pub fn compare_with_update(&mut self) -> Result<()> {
        if let Some(tables) = &mut self.tables {
            tables.compare_with_update()?;
        }
        if self.audits.is_none() {
            return Ok(());
        }
        let place = self.groups.step.replica.place();
        for unit in &mut self.units {
            unit.params.wait()?;
            let compared = unit.owner.compare(unit.params.here());
            compared.map_err(|e| e.at(format_args!("{} on {place}", unit.layout.name)))?;
        }
        Ok(())
    }

    /// The last step at which an audit has found replicas equal, or the first; none without audits,
    /// or with one replica, which is compared with nobody.
    pub fn audited(&self) -> Option<u64> {
        self.audits.filter(|_| self.groups.step.replica.size() > 1).and_then(|audits| audits.good)
    }

    /// The last step at which replicas were equal, once an audit has found that they are no more.
    pub fn doubtful_since(&self) -> Option<u64> {
        let of_tables = self.tables.as_ref().and_then(|tables| tables.doubtful_since());
        of_tables.or(self.audits.and_then(|audits| audits.doubtful_since))
    }
}

/// The places whose digest is not that of most others, or all where there are no most; none where
/// all agree. Those without a digest own nothing.
fn odd_ones(digests: &[(&str, Option<u64>)]) -> Option<String> {
    let known: Vec<(&str, u64)> =
        digests.iter().filter_map(|(place, digest)| Some((*place, (*digest)?))).collect();
    let count = |wanted: u64| known.iter().filter(|(_, digest)| *digest == wanted).count();
    let (_, most) = known.iter().max_by_key(|(_, digest)| count(*digest))?;
    let odd: Vec<&str> =
        known.iter().filter(|(_, digest)| digest != most).map(|(place, _)| *place).collect();
    if odd.is_empty() {
        return None;
    }
    if 2 * odd.len() < known.len() {
        let others = known.len() - odd.len();
        return Some(format!(
            "on {} differ from those of the {others} other replicas",
            odd.join(", ")
        ));
    }
    let all: Vec<&str> = known.iter().map(|(place, _)| *place).collect();
    Some(format!("differ between {}", all.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_odd_ones_are_named() {
        let found = |digests: &[Option<u64>]| {
            let places = ["a", "b", "c", "d"];
            let told: Vec<_> = places.into_iter().zip(digests.iter().copied()).collect();
            odd_ones(&told)
        };
        assert_eq!(found(&[Some(1), Some(1), Some(1)]), None);
        assert_eq!(found(&[Some(1), None]), None);
        assert_eq!(found(&[]), None);
        assert_eq!(found(&[Some(1), Some(2)]).unwrap(), "differ between a, b");
        let one = found(&[Some(1), Some(1), Some(3), Some(1)]).unwrap();
        assert_eq!(one, "on c differ from those of the 3 other replicas");
        assert_eq!(
            found(&[Some(1), Some(1), Some(2), Some(2)]).unwrap(),
            "differ between a, b, c, d"
        );
    }
}
