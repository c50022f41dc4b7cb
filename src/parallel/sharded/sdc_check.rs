//! SDC (silent data corruption) checks: detect memory that changes between updates, and replicas
//! whose arithmetic differs.

use serde::{Deserialize, Serialize};

use super::Sharded;
use super::host_units::HostUnits;
use hpctrain_base::error::{Error, Result};
use hpctrain_device::Kernels;

/// The digests of a replica, which it sends to the others.
#[derive(Serialize, Deserialize)]
struct ReplicaDigests {
    /// The rank and host.
    place: String,
    /// The digest of each unit.
    digests: Vec<Option<u64>>,
}

impl<B: Kernels> Sharded<B> {
    /// Checks before the update of step `step` that memory did not change between the last two
    /// updates, and periodically that replicas have the same values. Does nothing if SDC checks are
    /// off. Collective over replicas.
    ///
    /// # Errors
    /// Returns an error if values have changed or differ, or a message fails.
    pub fn check_sdc(&mut self, step: u64) -> Result<()> {
        if let Some(tables) = self.host_units.as_mut().and_then(HostUnits::with_sdc_checks) {
            tables.check_sdc(step)?;
        }
        let Some(checks) = &mut self.sdc_checks else { return Ok(()) };
        let good = *checks.last_good.get_or_insert(step);
        let compares = step.is_multiple_of(checks.every);
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
        let mine = serde_json::to_vec(&ReplicaDigests { place, digests })
            .map_err(|e| Error::internal(e.to_string()))?;
        let messages = self.groups.step.replica.gather_bytes(mine).wait()?;
        let replicas: Vec<ReplicaDigests> = messages
            .iter()
            .map(|message| serde_json::from_slice(message))
            .collect::<Result<_, _>>()
            .map_err(|e| Error::comm(format!("another rank sent malformed digests: {e}")))?;
        for (index, unit) in self.units.iter().enumerate() {
            let of_unit: Vec<(&str, Option<u64>)> = replicas
                .iter()
                .map(|replica| {
                    (replica.place.as_str(), replica.digests.get(index).copied().flatten())
                })
                .collect();
            if let Some(who) = minority(&of_unit) {
                checks.suspect_since = Some(good);
                let message = format!(
                    "step {step}: parameters or optimizer state of {} {who}",
                    unit.layout.name
                );
                return Err(Error::corrupted(message).hint(format!(
                    "a machine computes or stores wrong values: continue with --resume auto without it; checkpoints after \
                     step {good} count as damaged"
                )));
            }
        }
        checks.last_good = Some(step);
        Ok(())
    }

    /// Checks before a save that everything this rank owns has not changed since the last update.
    /// Does nothing if SDC checks are off.
    ///
    /// # Errors
    /// Returns an error if values have changed, or the device fails.
    pub fn check_unchanged(&mut self) -> Result<()> {
        if let Some(tables) = self.host_units.as_mut().and_then(HostUnits::with_sdc_checks) {
            tables.check_unchanged()?;
        }
        if self.sdc_checks.is_none() {
            return Ok(());
        }
        let place = self.groups.step.replica.place();
        for unit in &mut self.units {
            unit.params.wait()?;
            let compared = unit.owner.compare(unit.params.get());
            compared.map_err(|e| e.at(format_args!("{} on {place}", unit.layout.name)))?;
        }
        Ok(())
    }

    /// Returns the last step at which an SDC check found replicas equal, or the first step; none
    /// without SDC checks or with a single replica.
    pub fn last_checked_step(&self) -> Option<u64> {
        self.sdc_checks
            .filter(|_| self.groups.step.replica.size() > 1)
            .and_then(|checks| checks.last_good)
    }

    /// Returns the last step at which replicas were equal, once an SDC check has found that they
    /// differ.
    pub fn suspect_since(&self) -> Option<u64> {
        let of_tables = self.host_units.as_ref().and_then(HostUnits::suspect_since);
        of_tables.or(self.sdc_checks.and_then(|checks| checks.suspect_since))
    }
}

/// Describes the replicas whose digest differs from that of the majority, or all if there is no
/// majority; returns none if all agree. Ranks without a digest own nothing.
fn minority(digests: &[(&str, Option<u64>)]) -> Option<String> {
    let known: Vec<(&str, u64)> =
        digests.iter().filter_map(|(place, digest)| Some((*place, (*digest)?))).collect();
    let count = |value: u64| known.iter().filter(|(_, digest)| *digest == value).count();
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
    fn the_minority_is_named() {
        let found = |digests: &[Option<u64>]| {
            let places = ["a", "b", "c", "d"];
            minority(&places.into_iter().zip(digests.iter().copied()).collect::<Vec<_>>())
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
